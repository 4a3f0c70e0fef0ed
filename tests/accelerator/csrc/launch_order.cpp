#include "launch_order.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace stand_in {
namespace {

// All collectives of a communicator, or what one of its ranks sends to another.
struct Channel {
  std::weak_ptr<Group> group;
  std::size_t index = 0;      // in the group's segment
  std::vector<int> ranks;     // of the group, that take part
  std::uint32_t before = 0;   // works launched before those that are launched now
  std::uint32_t through = 0;  // and with them

  bool has_process(std::int64_t process) const {
    const auto held = group.lock();
    return held && std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
             return held->processes.at(static_cast<std::size_t>(rank)) == process &&
                    !held->segment.left(rank);
           });
  }
};

struct Launches {
  std::mutex mutex;
  std::map<std::uint64_t, Channel> channels;  // by key
};

Launches& launches() {
  static Launches* const leaked = std::make_unique<Launches>().release();
  return *leaked;
}

std::uint64_t key_of(const Group& group, std::size_t channel) { return group.key + channel; }

Channel& channel_of(const std::shared_ptr<Group>& group, const LaunchText& work) {
  const bool paired = work.sender >= 0;
  const std::size_t index = paired ? group->segment.channel_of_pair(work.sender, work.receiver) : 0;
  Channel& channel = launches().channels[key_of(*group, index)];
  if (channel.ranks.empty()) {
    channel.group = group;
    channel.index = index;
    if (paired) {
      channel.ranks = {work.sender, work.receiver};
    }
    for (int rank = 0; !paired && rank < group->size; ++rank) {
      channel.ranks.push_back(rank);
    }
  }
  return channel;
}

void write(Launch& launch, const LaunchText& work, std::uint64_t number) {
  launch.number = 0;
  launch.text.fill(0);
  std::memcpy(launch.text.data(), work.text.data(), std::min(work.text.size(), kTextBytes - 1));
  std::copy(work.sends.begin(), work.sends.end(), launch.sends.begin());
  std::copy(work.receives.begin(), work.receives.end(), launch.receives.begin());
  launch.count = 0;
  for (const auto& [key, channel] : launches().channels) {
    if (launch.count == kMaxChannels) {
      throw std::runtime_error("stand_in_ccl: more channels are in use than can be compared");
    }
    launch.channels.at(launch.count++) = {key, channel.before, channel.through};
  }
  launch.number = number;
}

std::string said(const Group& group, int rank, const Launch& launch) {
  return "rank " + std::to_string(rank) + " of " + group.name + ": " + launch.text.data();
}

[[noreturn]] void fail(const std::shared_ptr<Group>& group, const Channel& other,
                       const std::string& reason) {
  group->segment.fail(reason);
  if (const auto also = other.group.lock()) {
    also->segment.fail(reason);
  }
  throw std::runtime_error(reason);
}

void compare_works(const std::shared_ptr<Group>& group, const Channel& channel, int peer,
                   const Launch& mine, const Launch& theirs) {
  const auto from = static_cast<std::size_t>(peer), here = static_cast<std::size_t>(group->rank);
  const bool same = channel.index != 0 ||  // a send and a receive
                    (mine.sends.at(from) == theirs.receives.at(here) &&
                     mine.receives.at(from) == theirs.sends.at(here));
  const auto words = [&](const Launch& launch) {
    const std::string text = launch.text.data();
    return channel.index == 0 ? text : text.substr(text.find(' '));
  };
  if (words(mine) != words(theirs) || !same) {
    fail(group, channel,
         "stand_in_ccl: the ranks launched different works as number " +
             std::to_string(mine.number) + ". " + said(*group, group->rank, mine) + ". " +
             said(*group, peer, theirs));
  }
}

// The text of a work of a channel that this rank or `peer` launched.
std::string text_of(const Channel& channel, std::int64_t process, std::uint64_t number) {
  const auto group = channel.group.lock();
  if (!group) {
    return "a work";
  }
  for (const int rank : channel.ranks) {
    const Launch& launch = group->segment.launch(channel.index, rank, number);
    if (group->processes.at(static_cast<std::size_t>(rank)) == process && launch.number == number) {
      return std::string(launch.text.data()) + " of " + group->name;
    }
  }
  return "work " + std::to_string(number) + " of " + group->name;
}

void compare_order(const std::shared_ptr<Group>& group, int peer, const Launch& mine,
                   const Launch& theirs) {
  const std::int64_t process = group->processes.at(static_cast<std::size_t>(peer));
  for (const auto& [key, channel] : launches().channels) {
    if (!channel.has_process(process)) {
      continue;
    }
    const auto* const end = theirs.channels.begin() + theirs.count;
    const auto* const found = std::find_if(
        theirs.channels.begin(), end, [key = key](const auto& each) { return each.key == key; });
    const std::uint32_t before = found == end ? 0 : found->before;
    const std::uint32_t through = found == end ? 0 : found->through;
    const bool theirs_first = before > channel.through;
    if (!theirs_first && channel.before <= through) {
      continue;
    }
    const std::uint64_t number = (theirs_first ? channel.through : through) + 1;
    const std::int64_t own = group->processes.at(static_cast<std::size_t>(group->rank));
    const std::string other = text_of(channel, theirs_first ? process : own, number);
    const std::string work = std::string(mine.text.data()) + " of " + group->name;
    const auto order = [&](bool other_first) {
      return other_first ? other + " before " + work : work + " before " + other;
    };
    fail(group, channel,
         "stand_in_ccl: two ranks launched works of two communicators in different orders, which "
         "can "
         "deadlock. Rank " +
             std::to_string(group->rank) + ": " + order(!theirs_first) + ". Rank " +
             std::to_string(peer) + ": " + order(theirs_first));
  }
}

}  // namespace

void compare_launches(const std::shared_ptr<Group>& group, const std::vector<LaunchText>& works) {
  group->segment.check();
  const std::lock_guard lock(launches().mutex);
  std::vector<std::pair<Channel*, std::uint64_t>> numbers;
  for (const LaunchText& work : works) {
    channel_of(group, work);
  }
  for (auto& [key, channel] : launches().channels) {
    channel.before = channel.through;
  }
  for (const LaunchText& work : works) {
    Channel& channel = channel_of(group, work);
    numbers.emplace_back(&channel, ++channel.through);
  }
  for (std::size_t index = 0; index < works.size(); ++index) {
    const auto& [channel, number] = numbers[index];
    write(group->segment.launch(channel->index, group->rank, number), works[index], number);
  }
  for (const auto& [channel, number] : numbers) {
    Launch& mine = group->segment.launch(channel->index, group->rank, number);
    for (const int peer : channel->ranks) {
      Launch& theirs = group->segment.launch(channel->index, peer, number);
      if (peer != group->rank && theirs.number == number) {
        compare_works(group, *channel, peer, mine, theirs);
        compare_order(group, peer, mine, theirs);
      } else if (theirs.number > number) {
        throw std::runtime_error(
            "stand_in_ccl: a rank is too far ahead of the others to be compared");
      }
    }
  }
}

void forget_group(Group& group) {
  group.segment.leave();
  const std::lock_guard lock(launches().mutex);
  const auto end = group.key + 1 + static_cast<std::uint64_t>(group.size * group.size);
  launches().channels.erase(launches().channels.lower_bound(group.key),
                            launches().channels.lower_bound(end));
}

}  // namespace stand_in
