#include "extent_checks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace zero_ext::core {
namespace {

std::string text(const StoreExtent& extent) {
  return "[" + std::to_string(extent.offset) + ", " + std::to_string(extent.offset + extent.bytes) +
         ")";
}

}  // namespace

void check_extents(std::vector<StoreExtent> extents, std::int64_t alignment) {
  for (const StoreExtent& extent : extents) {
    if (extent.offset < 0 || extent.offset % alignment != 0) {
      throw std::runtime_error("store: expected extents that begin at a multiple of " +
                               std::to_string(alignment) + " bytes, got " + text(extent) +
                               ". Allocate it from the store.");
    }
  }
  std::erase_if(extents, [](const StoreExtent& each) { return each.bytes == 0; });
  std::ranges::sort(extents, {}, &StoreExtent::offset);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].offset < extents[i - 1].offset + extents[i - 1].bytes) {
      throw std::runtime_error("store: extents " + text(extents[i - 1]) + " and " +
                               text(extents[i]) + " overlap. Allocate one for each range.");
    }
  }
}

}  // namespace zero_ext::core
