#include <sstream>

#include "attention.h"

namespace zero_ext::core {

std::string layout_error(const BlockRows& layout, std::int64_t total_blocks,
                         std::int64_t column_blocks) {
  std::ostringstream error;
  for (std::int64_t head = 0; head < layout.heads; ++head) {
    const std::int32_t* pointers = layout.pointers + head * (layout.row_blocks + 1);
    for (std::int64_t row = 0; row < layout.row_blocks; ++row) {
      const std::int64_t begin = pointers[row];
      const std::int64_t end = pointers[row + 1];
      if (begin < 0 || begin > end || end > total_blocks) {
        error << "argument 'row_pointers': expected numbers that ascend from 0 to at most the "
              << total_blocks << " entries of 'columns', got " << begin << " at [" << head << ", "
              << row << "] and " << end << " after it. Build the layout anew.";
        return error.str();
      }
      std::int64_t before = -1;
      for (std::int64_t at = begin; at < end; ++at) {
        const std::int64_t column = layout.columns[at];
        if (column <= before || column >= column_blocks) {
          error << "argument 'columns': expected columns of a row that ascend and lie below "
                << column_blocks << ", the number of column blocks, got " << column << " at " << at
                << ", in row [" << head << ", " << row << "]. Build the layout anew.";
          return error.str();
        }
        before = column;
      }
    }
  }
  return {};
}

}  // namespace zero_ext::core
