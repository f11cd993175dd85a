#include "mover/mover.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "common/forks.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kMostSlices = 1024, kMostPieces = 1u << 24;  // of a transfer that is cut: slices of pages

std::string path_text(std::span<const Tier> path) {
  std::string text;
  for (const Tier tier : path) text += (text.empty() ? "" : " -> ") + std::string(tier_name(tier));
  return text.empty() ? "(empty)" : text;
}

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

}  // namespace

Mover::Mover(const DevicePool* device, HostArena* host, DiskStore* disk, const MoverOptions& options,
             std::unique_ptr<StreamCopier> copier)
    : device_(device), host_(host), disk_(disk), process_(fork_generation()) {
  check(options);
  LedgerOptions ledger;
  ledger.device_page_bytes = host != nullptr ? host->payload_bytes() : 1;
  ledger.disk_page_bytes = host != nullptr ? host->page_bytes() : 1;
  ledger.bytes_in_flight = options.bytes_in_flight;
  ledger.queue_pages = options.queue_pages;
  if (copier) ledger.device_bytes_in_flight = copier->places() * copier->batch_bytes();
  parts_ = std::make_unique<Parts>(ledger);
  if (copier) {
    if (device == nullptr || host == nullptr) refuse("copier: it needs a device and a host tier");
    parts_->streams = std::make_unique<StreamExecutor>(parts_->scheduler, *host, std::move(copier), options.verify_host,
                                                       options.close_limit);
  } else if (device != nullptr && host != nullptr) {
    parts_->copies =
        std::make_unique<CopyExecutor>(parts_->scheduler, *host, std::make_unique<CpuCopier>(*device, *host),
                                       options.copy_threads, options.verify_host);
  }
  if (disk != nullptr) {
    IoOptions io;
    io.make_engine = options.make_engine;
    io.verify = options.verify;
    io.op_bytes = options.op_bytes;
    io.io_limit = options.io_limit;
    io.close_limit = options.close_limit;
    parts_->io = std::make_unique<IoExecutor>(parts_->scheduler, *host, *disk, std::move(io));
  }
}

void Mover::check(const MoverOptions& options) const {
  if (options.copy_threads < 1 || options.copy_threads > 64) {
    refuse("copy_threads = " + std::to_string(options.copy_threads) + ": 1 to 64 are possible");
  }
  if (options.queue_pages < 1) refuse("queue_pages = 0: at least 1 is needed");
  if (disk_ != nullptr && host_ == nullptr) refuse("disk: a disk tier needs a host tier, through which its pages go");
  if (host_ != nullptr && device_ != nullptr && device_->payload_bytes() != host_->payload_bytes()) {
    refuse("device pages have " + std::to_string(device_->payload_bytes()) + " bytes, host pages " +
           std::to_string(host_->payload_bytes()) + ": they must be equal");
  }
  if (disk_ != nullptr && disk_->payload_bytes() != host_->payload_bytes()) {
    refuse("disk pages have " + std::to_string(disk_->payload_bytes()) + " bytes, host pages " +
           std::to_string(host_->payload_bytes()) + ": they must be equal");
  }
}

Mover::~Mover() {
  if (close()) return;
  const bool blocked = parts_->io && parts_->io->blocked();        // its thread may come back,
  const bool stuck = parts_->streams && parts_->streams->stuck();  // or the device call whoever waited for it
  if (blocked || stuck) leave();
}

void Mover::leave() {
  static std::atomic<Parts*> left{nullptr};  // all of them
  Parts* const parts = parts_.release();
  parts->left_before = left.load();
  while (!left.compare_exchange_weak(parts->left_before, parts)) {
  }
}

Mover::Parts& Mover::parts() const {
  if (process_ != fork_generation())
    throw std::runtime_error("a mover works only in the process that made it, not after fork()");
  return *parts_;
}

bool Mover::close() {
  if (process_ != fork_generation()) {  // its threads and locks are the parent's: let it lie
    static_cast<void>(parts_.release());
    return true;
  }
  const std::lock_guard one_at_a_time(parts_->closing);
  parts_->scheduler.close();
  if (parts_->copies) parts_->copies->join();
  if (parts_->streams) parts_->streams->join();
  if (parts_->io) parts_->io->join();
  return !(parts_->io && parts_->io->stuck()) && !(parts_->streams && parts_->streams->stuck());
}

std::size_t Mover::poll(std::vector<Completion>* out) {
  Parts& p = parts();
  if (p.io) p.io->look(Clock::now());
  return p.scheduler.poll(out);
}

bool Mover::has_reports(bool routine) {
  Parts& p = parts();
  const Time now = Clock::now();
  if (p.io) p.io->look(now);
  return p.scheduler.has_reports(now, routine);
}

Submit Mover::submit(Order order, std::uintptr_t stream) {
  Parts& p = parts();
  check(order);
  const bool on_device = std::find(order.path.begin(), order.path.end(), Tier::kDevice) != order.path.end();
  if (p.streams && on_device && !p.streams->put_behind(stream, &order.fence)) return Submit::kFull;
  return p.scheduler.submit(order);
}

Slot Mover::slots_of(Tier tier) const {
  switch (tier) {
    case Tier::kDevice:
      return device_ != nullptr ? device_->slots() : 0;
    case Tier::kHost:
      return host_ != nullptr ? host_->slots() : 0;
    case Tier::kDisk:
      return disk_ != nullptr ? disk_->slots() : 0;
    default:
      return 0;
  }
}

void Mover::check(const Order& order) const {
  if (order.ticket == 0) refuse("ticket = 0: tickets start at 1");
  if (!is_priority(order.priority))
    refuse("priority = " + std::to_string(static_cast<int>(order.priority)) + ": " + kPrioritiesText);
  bool known = order.path.size() == 2 || (order.path.size() == 3 && order.path[0] != order.path[2]);
  for (std::size_t i = 0; known && i + 1 < order.path.size(); ++i) {
    known = lane_between(order.path[i], order.path[i + 1]).has_value();
  }
  if (!known)
    refuse("path = " + path_text(order.path) + ": neighbours among device, host, disk, one way, are possible");
  for (std::size_t place = 0; place < order.path.size(); ++place) {
    const Slot slots = slots_of(order.path[place]);
    const std::string name = tier_name(order.path[place]);
    if (slots == 0) refuse("path = " + path_text(order.path) + ": this mover has no " + name + " tier");
    for (std::uint32_t page = 0; page < order.count; ++page) {
      const Slot slot = order.slots[place * order.count + page];
      if (slot >= slots) {
        refuse("slots: " + name + " slot " + std::to_string(slot) + ": the tier has " + std::to_string(slots) +
               " slots");
      }
    }
  }
  const bool whole = order.identity_bytes >= kIdentityHead && order.identity_bytes % 8 == 0;
  if (!whole || (disk_ != nullptr && order.identity_bytes != identity_bytes(disk_->label_bytes()))) {
    const std::string want = disk_ != nullptr ? std::to_string(identity_bytes(disk_->label_bytes())) : "112 or more";
    refuse("identities: " + std::to_string(order.identity_bytes) + " bytes each: " + want + " are needed");
  }
  check_cuts(order);
}

void Mover::check_cuts(const Order& order) const {
  if (order.cuts.empty()) return;
  if (order.path.size() != 2 || order.path[1] != Tier::kDevice) {
    refuse("cuts: path = " + path_text(order.path) + ": only host -> device goes in slices");
  }
  if (order.cuts.size() > kMostSlices || order.count * order.cuts.size() > kMostPieces) {
    refuse("cuts: " + std::to_string(order.cuts.size()) + " slices of " + std::to_string(order.count) +
           " pages: up to " + std::to_string(kMostSlices) + " are possible, and " + std::to_string(kMostPieces) +
           " in all");
  }
  std::size_t before = 0;
  for (std::size_t i = 0; i < order.cuts.size(); ++i) {
    const std::size_t cut = order.cuts[i];
    const bool last = i + 1 == order.cuts.size();
    if (cut <= before || (last ? cut != host_->payload_bytes() : cut % 16 != 0)) {
      refuse("cuts: " + std::to_string(cut) + " after " + std::to_string(before) +
             ": rising multiples of 16 are needed, and the page's " + std::to_string(host_->payload_bytes()) +
             " bytes at the end");
    }
    before = cut;
  }
}

bool Mover::wait(std::chrono::nanoseconds timeout, std::uint64_t seen) {
  return parts().scheduler.wait(Clock::now() + timeout, seen);
}

MoverStats Mover::stats() const {
  const Parts& p = parts();
  MoverStats out;
  for (int i = 0; i < kLanes; ++i) out.lanes[i] = p.scheduler.stats(static_cast<Lane>(i));
  if (p.copies) out.device_note = p.copies->note();
  if (p.streams) out.device_note = p.streams->note();
  out.has_disk = p.io != nullptr;
  if (p.io) out.io = p.io->stats();
  out.offline = p.scheduler.offline();
  out.pending = p.scheduler.pending();
  return out;
}

}  // namespace kvtier
