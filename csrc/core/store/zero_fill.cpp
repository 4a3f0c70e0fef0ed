#include "zero_fill.h"

#include <algorithm>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>

#include "../base/host_memory.h"

namespace zero_ext::core {
namespace {

constexpr std::int64_t kPieceBytes = 8 << 20;
constexpr std::size_t kPiecesInFlight = 8;

// On an error too, no transfer outlives this.
class TicketsInOrder {
 public:
  TicketsInOrder() = default;
  ~TicketsInOrder() {
    for (const auto& ticket : tickets_) {
      try {
        ticket->wait();
      } catch (const std::exception&) {  // the first error is on its way already
      }
    }
  }
  TicketsInOrder(const TicketsInOrder&) = delete;
  TicketsInOrder& operator=(const TicketsInOrder&) = delete;

  std::size_t count() const { return tickets_.size(); }
  void add(std::shared_ptr<Ticket> ticket) { tickets_.push_back(std::move(ticket)); }
  void wait_for_oldest() {
    const auto ticket = std::move(tickets_.front());
    tickets_.pop_front();
    ticket->wait();
  }

 private:
  std::deque<std::shared_ptr<Ticket>> tickets_;
};

}  // namespace

void write_zeros(Engine& engine, const std::shared_ptr<File>& file, std::int64_t offset,
                 std::int64_t bytes) {
  const std::int64_t piece_bytes = std::min(bytes, kPieceBytes);
  if (piece_bytes <= 0) return;
  const std::shared_ptr<void> zeros(allocate_host(piece_bytes), [](void* memory) {
    if (memory != nullptr) free_host(memory);
  });
  if (zeros == nullptr) {
    throw std::runtime_error("store: no memory for " + std::to_string(piece_bytes) +
                             " bytes of zeros");
  }
  const auto* const data = static_cast<const std::byte*>(zeros.get());
  TicketsInOrder under_way;
  for (std::int64_t done = 0; done < bytes; done += piece_bytes) {
    if (under_way.count() == kPiecesInFlight) under_way.wait_for_oldest();
    const auto length = static_cast<std::size_t>(std::min(piece_bytes, bytes - done));
    under_way.add(engine.write(file, offset + done, std::span(data, length), zeros));
  }
  while (under_way.count() > 0) under_way.wait_for_oldest();
}

}  // namespace zero_ext::core
