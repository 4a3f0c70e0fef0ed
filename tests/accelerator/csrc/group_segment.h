// The memory that the ranks of a communicator share, and how bytes travel through it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stand_in {

constexpr std::size_t kPipeBytes = std::size_t{64} << 10;
constexpr std::size_t kLaunchesKept = 512;  // how far a rank may run ahead of the others
constexpr std::size_t kMaxChannels = 64;    // that a process uses at a time
constexpr std::size_t kTextBytes = 160;
constexpr int kMaxRanks = 8;

// Bytes on their way from one rank to another.
struct Pipe {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  std::array<std::byte, kPipeBytes> data;
};

// How many works of a channel a process had launched before a launch, and with it.
struct ChannelCount {
  std::uint64_t key;
  std::uint32_t before;
  std::uint32_t through;
};

// What a rank launched on a channel, for the other ranks to compare with what they do.
struct Launch {
  std::atomic<std::uint64_t> number;  // from 1 on; 0 while it is written
  std::array<char, kTextBytes> text;
  std::array<std::uint64_t, kMaxRanks> sends;     // bytes to each rank where these may differ
  std::array<std::uint64_t, kMaxRanks> receives;  // and from each
  std::uint32_t count;
  std::array<ChannelCount, kMaxChannels> channels;
};

// One rank's end of a transfer.
struct Transfer {
  int peer;
  std::byte* data;
  std::size_t bytes;
  bool sends;
  std::size_t done = 0;
};

// Mapped by all ranks of a communicator; gone when the last of them unmaps it or dies.
class GroupSegment {
 public:
  // Rank 0 makes the memory and names it; the others map what it named.
  GroupSegment(int rank, int size, const std::string& name);
  ~GroupSegment();
  GroupSegment(const GroupSegment&) = delete;
  GroupSegment& operator=(const GroupSegment&) = delete;

  // What the other ranks map it by.
  std::string name() const;
  // Launches of `rank` on a channel: 0 for the collectives of all ranks, see channel_of_pair.
  Launch& launch(std::size_t channel, int rank, std::uint64_t number);
  std::size_t channel_of_pair(int sender, int receiver) const;

  // Ends all transfers of all ranks, now and later; the first reason stays.
  void fail(const std::string& reason);
  bool failed() const;
  // Throws the reason of the failure, if there was one.
  void check() const;
  // Ends this rank's transfers alone: the others wait for it in vain.
  void abort() { aborted_ = true; }

  // This rank launches nothing any more.
  void leave();
  bool left(int rank) const;

  // Whether another rank cannot go on before this one does.
  bool wanted() const;

  // Moves all bytes of all transfers, those of each pair of ranks in order; throws where the
  // communicator fails or time runs out.
  void move(std::vector<Transfer>& transfers, std::chrono::milliseconds limit);

 private:
  struct Header;

  Pipe& pipe(int sender, int receiver);
  bool advance(Transfer& transfer);
  bool is_open(const Transfer& transfer);
  void ring(int rank);

  const int rank_;
  const int size_;
  int file_ = -1;
  std::size_t bytes_ = 0;
  Header* header_ = nullptr;
  Pipe* pipes_ = nullptr;
  Launch* launches_ = nullptr;
  std::atomic<bool> aborted_{false};
};

}  // namespace stand_in
