// What is launched on communicators, compared between the ranks when it is launched.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group_segment.h"

namespace stand_in {

// The ranks of a communicator, and what each of them does there.
struct Group {
  std::string name;
  std::uint64_t key;  // of this communicator in all processes
  int rank;
  int size;
  std::vector<std::int64_t> processes;  // by rank
  GroupSegment segment;

  Group(std::string name, std::uint64_t key, int rank, int size, const std::string& segment_name)
      : name(std::move(name)),
        key(key),
        rank(rank),
        size(size),
        segment(rank, size, segment_name) {}
};

// One work, as the other ranks are to have it.
struct LaunchText {
  std::string text;
  int sender = -1;  // of a transfer between two ranks
  int receiver = -1;
  std::vector<std::uint64_t> sends;  // bytes to each rank where these may differ
  std::vector<std::uint64_t> receives;
};

// Compares works that this process starts at the same time with those of the other ranks. A
// communicator fails, on all of its ranks, and this throws, where two ranks start different works
// as the same, or start works of two channels in different orders: a kernel of NCCL waits for its
// peers while it keeps others from starting.
void compare_launches(const std::shared_ptr<Group>& group, const std::vector<LaunchText>& works);

// Forgets a communicator whose works are over.
void forget_group(Group& group);

}  // namespace stand_in
