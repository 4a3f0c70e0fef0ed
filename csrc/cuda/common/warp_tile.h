// Elements as the lanes of a warp hold them, moved in accesses of 16 bytes, each of which covers
// 512 neighboring bytes of the warp's.
//
// A tile is rows of 32 groups: lane L holds group L of each row. A group is what 16 bytes hold of
// the widest type that a kernel moves. 16 bytes of a narrower type hold groups of kSpan
// neighboring lanes, so each of these lanes moves 16 bytes of one of kSpan rows, and they swap the
// groups. Where rows have fewer groups, kRowLanes lanes have all rows of a part of the tile, and
// the next lanes those of the part behind it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "../../core/base/host_device.h"
#include "device_math.h"
#include "vectorized_access.h"
#include "warp_registers.h"
#include "warp_shuffle.h"

namespace zero_ext::cuda {

// Calls visit(local, i) for the numbers `begin` + lane, 32 further on and so on, below `end`.
template <class Visit>
ZERO_EXT_HOST_DEVICE void for_each_strided(std::int64_t begin, std::int64_t end,
                                           const Visit& visit) {
  each_lane([&](int local, int lane) {
    ZERO_EXT_UNROLL_BY(1)
    for (std::int64_t i = begin + lane; i < end; i += kWarpLanes) visit(local, i);
  });
}

// One word of each lane, lane 0's first, in 16 bytes of each of the first eight lanes. Needs an
// address that is a multiple of kAccessBytes.
ZERO_EXT_HOST_DEVICE void store_lane_words(void* target, const LaneWords& words) {
  constexpr int kOfAccess = static_cast<int>(kAccessBytes / sizeof(std::uint32_t));
  AccessWords gathered[kThreadLanes];
  ZERO_EXT_UNROLL
  for (int k = 0; k < kOfAccess; ++k) {
    const LaneWords received =
        shuffle(words, [&](int lane) { return (lane * kOfAccess + k) % kWarpLanes; });
    each_lane([&](int local, int) { gathered[local].at[k] = received.at[local]; });
  }
  each_lane([&](int local, int lane) {
    if (lane >= kWarpLanes / kOfAccess) return;
    store_words_global(static_cast<std::uint32_t*>(target) + lane * kOfAccess, gathered[local]);
  });
}

ZERO_EXT_HOST_DEVICE LaneWords load_lane_words(const void* source) {
  constexpr int kOfAccess = static_cast<int>(kAccessBytes / sizeof(std::uint32_t));
  AccessWords own[kThreadLanes] = {};
  each_lane([&](int local, int lane) {
    if (lane >= kWarpLanes / kOfAccess) return;
    own[local] = load_words(static_cast<const std::uint32_t*>(source) + lane * kOfAccess);
  });
  LaneWords result;
  ZERO_EXT_UNROLL
  for (int k = 0; k < kOfAccess; ++k) {
    LaneWords words;
    each_lane([&](int local, int) { words.at[local] = own[local].at[k]; });
    const LaneWords received = shuffle(words, [](int lane) { return lane / kOfAccess; });
    each_lane([&](int local, int lane) {
      if (lane % kOfAccess == k) result.at[local] = received.at[local];
    });
  }
  return result;
}

template <int kGroupElements, int kRowCount, int kRowLanes = kWarpLanes>
struct WarpTile {
  static constexpr int kGroup = kGroupElements;
  static constexpr int kRows = kRowCount;
  static constexpr int kRow = kRowLanes * kGroup;
  static constexpr int kElements = kWarpLanes * kGroup * kRows;
  static constexpr int kPerLane = kGroup * kRows;  // elements of a lane

  template <class T>
  using Fragment = Registers<T, kPerLane>;
  template <class T>
  static constexpr int kSpan = static_cast<int>(kAccessBytes / sizeof(T)) / kGroup;

  // The position in the tile of a lane's element.
  static ZERO_EXT_HOST_DEVICE int position(int lane, int element) {
    return (lane / kRowLanes * kRows + element / kGroup) * kRow + lane % kRowLanes * kGroup +
           element % kGroup;
  }

  // Of rows that begin `stride` elements apart. Needs addresses that are multiples of kAccessBytes.
  template <class T>
  static ZERO_EXT_HOST_DEVICE void load(const T* source, Fragment<T>& to,
                                        std::int64_t stride = kRow) {
    ZERO_EXT_UNROLL
    for (int row = 0; row < kRows; row += kSpan<T>) {
      Words words;
      each_lane([&](int local, int lane) {
        const AccessWords bits = load_words(source + access_offset<T>(row, lane, stride));
        ZERO_EXT_UNROLL
        for (int w = 0; w < kWords; ++w) words.at[local][w] = bits.at[w];
      });
      swap_groups<kSpan<T>>(words);
      each_lane([&](int local, int) {
        AccessWords bits;
        ZERO_EXT_UNROLL
        for (int w = 0; w < kWords; ++w) bits.at[w] = words.at[local][w];
        const auto groups = std::bit_cast<Access<T>>(bits);
        ZERO_EXT_UNROLL
        for (int k = 0; k < kSpan<T> * kGroup; ++k) to.at[local][row * kGroup + k] = groups.at[k];
      });
    }
  }

  template <class T>
  static ZERO_EXT_HOST_DEVICE void store(T* target, const Fragment<T>& from) {
    ZERO_EXT_UNROLL
    for (int row = 0; row < kRows; row += kSpan<T>) {
      Words words;
      each_lane([&](int local, int) {
        Access<T> groups;
        ZERO_EXT_UNROLL
        for (int k = 0; k < kSpan<T> * kGroup; ++k) groups.at[k] = from.at[local][row * kGroup + k];
        const auto bits = std::bit_cast<AccessWords>(groups);
        ZERO_EXT_UNROLL
        for (int w = 0; w < kWords; ++w) words.at[local][w] = bits.at[w];
      });
      swap_groups<kSpan<T>>(words);
      each_lane([&](int local, int lane) {
        AccessWords bits;
        ZERO_EXT_UNROLL
        for (int w = 0; w < kWords; ++w) bits.at[w] = words.at[local][w];
        store_words_global(target + access_offset<T>(row, lane, kRow), bits);
      });
    }
  }

  // To shared memory, of the widest type.
  template <class T>
  static ZERO_EXT_HOST_DEVICE void store_shared(T* target, const Fragment<T>& from) {
    static_assert(kSpan<T> == 1);
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < kRows; ++row) {
        Access<T> group;
        ZERO_EXT_UNROLL
        for (int k = 0; k < kGroup; ++k) group.at[k] = from.at[local][row * kGroup + k];
        store_words(target + access_offset<T>(row, lane, kRow), std::bit_cast<AccessWords>(group));
      }
    });
  }

  // Element by element those whose positions are in [first, last); the others are `otherwise`.
  template <class T>
  static ZERO_EXT_HOST_DEVICE void load_partial(const T* source, std::int64_t first,
                                                std::int64_t last, T otherwise, Fragment<T>& to) {
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPerLane; ++k) {
        const int at = position(lane, k);
        to.at[local][k] = first <= at && at < last ? source[at] : otherwise;
      }
    });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE void store_partial(T* target, std::int64_t first, std::int64_t last,
                                                 const Fragment<T>& from) {
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPerLane; ++k) {
        const int at = position(lane, k);
        if (first <= at && at < last) target[at] = from.at[local][k];
      }
    });
  }

 private:
  static constexpr int kWords = static_cast<int>(kAccessBytes / sizeof(std::uint32_t));
  using Words = Registers<std::uint32_t, kWords>;
  template <class T>
  struct Access {
    T at[kAccessBytes / sizeof(T)];
  };

  // First element of a lane's access among those of kSpan rows from `row` on.
  template <class T>
  static ZERO_EXT_HOST_DEVICE std::int64_t access_offset(int row, int lane, std::int64_t stride) {
    static_assert(kSpan<T> >= 1 && kRows % kSpan<T> == 0 && kRowLanes % kSpan<T> == 0);
    const int own = lane % kSpan<T>;
    return (lane / kRowLanes * kRows + row + own) * stride + (lane % kRowLanes - own) * kGroup;
  }

  // Of kSpan neighboring lanes, gives lane i its group of what lane j moves, as group j: the
  // transposition of a matrix, bit by bit of the lanes' numbers.
  template <int kSpanLanes>
  static ZERO_EXT_HOST_DEVICE void swap_groups(Words& words) {
    constexpr int kOfGroup = kWords / kSpanLanes;
    ZERO_EXT_UNROLL
    for (int bit = 1; bit < kSpanLanes; bit *= 2) {
      ZERO_EXT_UNROLL
      for (int low = 0; low < kWords; ++low) {
        if ((low / kOfGroup & bit) != 0) continue;
        const int high = low + bit * kOfGroup;
        LaneWords sent;
        each_lane([&](int local, int lane) {
          sent.at[local] = select((lane & bit) != 0, words.at[local][low], words.at[local][high]);
        });
        const LaneWords received = shuffle_xor(sent, bit);
        each_lane([&](int local, int lane) {
          const bool upper = (lane & bit) != 0;
          words.at[local][low] = select(upper, received.at[local], words.at[local][low]);
          words.at[local][high] = select(upper, words.at[local][high], received.at[local]);
        });
      }
    }
  }
};

// The tile of a kernel that moves elements of these types, in at least kMinRows rows.
template <int kMinRows, class... T>
using WarpTileOf =
    WarpTile<static_cast<int>(kAccessBytes / std::max({sizeof(T)...})),
             std::max(kMinRows,
                      static_cast<int>(std::max({sizeof(T)...}) / std::min({sizeof(T)...})))>;

}  // namespace zero_ext::cuda
