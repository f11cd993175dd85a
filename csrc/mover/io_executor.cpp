#include "mover/io_executor.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "copy/checksum.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kLanded = 4;              // at most so many operations have ended and wait to be verified
constexpr std::chrono::milliseconds kTick{20};  // how often hung operations are looked for
constexpr const char* kOutOfService = "disk tier out of service: ";

}  // namespace

IoExecutor::IoExecutor(Scheduler& scheduler, HostArena& host, DiskStore& store, IoOptions options)
    : scheduler_(scheduler), host_(host), store_(store), options_(std::move(options)), ops_(options_.depth) {
  free_.reserve(options_.depth);
  queued_.reserve(options_.depth);
  landed_.reserve(kLanded);
  for (unsigned i = options_.depth; i-- > 0;) free_.push_back(i);
  thread_ = std::thread([this] { run(); });
}

void IoExecutor::join() {
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(end_mutex_);
    while (!end_.wait_for(lock, kTick, [this] { return ended_; }) && !blocked_) blocked_ = hangs(Clock::now());
  }
  if (!blocked_) return thread_.join();
  stuck_.store(true);
  thread_.detach();
  scheduler_.abandon();
}

bool IoExecutor::hangs(Time now) const {
  const Clock::rep since = blocking_since_.load();
  return since != 0 && now - Time(Clock::duration(since)) >= options_.io_limit;
}

void IoExecutor::look(Time now) {
  if (!hangs(now) || offline_) return;
  const bool first = go_offline([this] {
    return "an operation on the table of " + store_.dir() + " has not returned (" + std::strerror(ETIMEDOUT) +
           "); its pages are misses until the store is opened again";
  });
  if (first) scheduler_.stall_disk();
}

IoStats IoExecutor::stats() const {
  const std::lock_guard lock(stats_mutex_);
  IoStats out = stats_;
  if (unexplained_) out.warning = kOutOfService + std::string("there was no memory to say why");
  return out;
}

void IoExecutor::run() {
  begin();
  serve();
  const std::lock_guard lock(end_mutex_);
  ended_ = true;
  end_.notify_all();
}

// What is thrown in this thread nobody else could catch.
void IoExecutor::begin() {
  std::string note;
  try {
    engine_ = options_.make_engine(&note);
    const std::lock_guard lock(stats_mutex_);
    if (engine_) stats_.engine = engine_->name(), stats_.note = note;
  } catch (const std::exception& error) {
    engine_.reset();
    go_offline([&] { return std::string("no way to do I/O: ") + error.what(); });
  }
  if (engine_) {
    scheduler_.set_waker([this] { engine_->wake(); });
  } else {
    go_offline([&] { return "no way to do I/O: " + note; });
  }
}

void IoExecutor::serve() {
  Time give_up = kNever, next_check{};
  for (;;) {
    const bool wants_work = fill();
    if (free_.size() == ops_.size()) {
      if (!scheduler_.wait_disk()) break;
      continue;
    }
    if (give_up == kNever && scheduler_.closed()) give_up = Clock::now() + options_.close_limit;
    engine_->flush();
    // The disk has its new work. One operation is dealt with at a time, so that the next waits no longer than that.
    handle_landed(1);
    const bool saw_all = reap(wants_work);
    const Time now = Clock::now();
    if (now >= next_check && saw_all) {  // whatever has ended was seen: what is left really runs
      check_hung(now);
      next_check = now + kTick;
    }
    if (now >= give_up) break;
  }
  handle_landed(landed_.size());
  scheduler_.set_waker(nullptr);
  if (free_.size() != ops_.size()) abandon();
  engine_.reset();
}

// What has ended lands; waits for the first only if there is nothing else to do. True: nothing more has ended.
bool IoExecutor::reap(bool wants_work) {
  Clock::duration wait{};
  if (landed_.empty()) {
    const Time until = std::min(scheduler_.before_reap(wants_work), Clock::now() + kTick);
    wait = std::max(Clock::duration::zero(), until - std::min(until, Clock::now()));
  }
  IoResult results[kLanded];
  const std::size_t room = kLanded - landed_.size();
  const std::size_t count = engine_->reap(results, room, wait);
  for (std::size_t i = 0; i < count; ++i) {
    if (results[i].tag >= ops_.size()) continue;  // not ours: an engine must not do this
    Op& op = ops_[results[i].tag];
    if (!op.in_use || op.landed) continue;  // nor that
    op.landed = true;
    landed_.push_back(results[i]);
    if (op.released || op.single || !complete(op, results[i].result)) continue;  // some of it may have to go again
    scheduler_.landed(op.lane, op.count);
    op.released = true;
  }
  return count < room;
}

void IoExecutor::handle_landed(std::size_t most) {
  for (; most > 0 && !landed_.empty(); --most) {
    const IoResult result = landed_.front();
    landed_.erase(landed_.begin());
    handle(result);
  }
}

bool IoExecutor::complete(const Op& op, std::int64_t result) const {
  return result == static_cast<std::int64_t>(op.count * host_.page_bytes());
}

// Takes what the lanes allow. False: there was no room left for more.
bool IoExecutor::fill() {
  drop_queued();
  for (std::size_t n = queued_.size(); n-- > 0;) {
    const std::uint32_t index = queued_.front();
    queued_.erase(queued_.begin());
    submit(ops_[index]);
  }
  Chunk chunk;
  while (queued_.empty() && !free_.empty()) {
    const auto most = static_cast<std::uint32_t>(free_.size());  // every page may become an operation
    if (!scheduler_.take_disk(most, options_.op_bytes, &chunk)) return true;
    start(chunk);
  }
  return false;
}

void IoExecutor::start(const Chunk& chunk) {
  std::uint32_t failed[Chunk::kMaxPages];
  PageStatus why[Chunk::kMaxPages];
  std::uint32_t failures = 0;
  Op* op = nullptr;
  for (std::uint32_t i = 0; i < chunk.count; ++i) {
    std::uint64_t expected = 0;
    const PageStatus status = prepare(chunk, chunk.pages[i], &expected);
    if (status != PageStatus::kPending) {
      failed[failures] = chunk.pages[i];
      why[failures++] = status;
      continue;
    }
    const Transfer& t = *chunk.transfer;
    if (op != nullptr) {
      const std::uint32_t last = op->pages[op->count - 1];
      const bool neighbours = t.slot(chunk.hop, chunk.pages[i]) == t.slot(chunk.hop, last) + 1 &&
                              t.slot(chunk.hop + 1, chunk.pages[i]) == t.slot(chunk.hop + 1, last) + 1;
      if (!neighbours || (op->count + 1) * host_.page_bytes() > options_.op_bytes) {
        submit(*op);
        op = nullptr;
      }
    }
    if (op == nullptr) op = &new_op(chunk);
    op->pages[op->count] = chunk.pages[i];
    op->expected[op->count++] = expected;
  }
  if (op != nullptr) submit(*op);
  if (failures != 0) scheduler_.finish(*chunk.transfer, chunk.hop, {failed, failures}, why);
}

// What must be so before the page's bytes move; kPending: go on.
PageStatus IoExecutor::prepare(const Chunk& chunk, std::uint32_t page, std::uint64_t* expected) {
  const Transfer& t = *chunk.transfer;
  const Slot from = t.slot(chunk.hop, page), to = t.slot(chunk.hop + 1, page);
  if (chunk.lane == Lane::kStage) {
    *expected = store_.checksum_for(from, t.identity(page));
    host_.checksum(to) = 0;
    return *expected == 0 ? PageStatus::kStale : PageStatus::kPending;
  }
  // The record goes before the first byte changes, so that no crash leaves a record over another page's bytes.
  const Blocking here(*this);
  const int rc = store_.clear_record(to);
  if (rc < 0) note_health(false, "clearing the record of", to, rc);
  return rc < 0 ? PageStatus::kWriteError : PageStatus::kPending;
}

IoExecutor::Op& IoExecutor::new_op(const Chunk& chunk) {
  Op& op = ops_[free_.back()];
  free_.pop_back();
  op.transfer = chunk.transfer;
  op.hop = chunk.hop;
  op.lane = chunk.lane;
  op.count = 0;
  op.in_use = true;
  op.queued = op.landed = op.released = op.hung = op.single = false;
  op.at = 0;
  return op;
}

Slot IoExecutor::host_slot(const Op& op, std::uint32_t i) const {
  return op.transfer->slot(op.lane == Lane::kStage ? op.hop + 1 : op.hop, op.pages[i]);
}

Slot IoExecutor::disk_slot(const Op& op, std::uint32_t i) const {
  return op.transfer->slot(op.lane == Lane::kStage ? op.hop : op.hop + 1, op.pages[i]);
}

void IoExecutor::submit(Op& op) {
  IoRequest request{};
  request.tag = static_cast<std::uint64_t>(&op - ops_.data());
  request.fd = store_.fd();
  request.write = op.lane == Lane::kSpill;
  request.offset = store_.offset(disk_slot(op, op.at));
  request.buffer = host_.page(host_slot(op, op.at));
  request.length = host_.page_bytes() * (op.single ? 1 : op.count);
  op.started = Clock::now();
  op.landed = false;
  op.queued = !engine_->submit(request);
  if (op.queued) {
    queued_.push_back(static_cast<std::uint32_t>(request.tag));
    return;
  }
  const std::lock_guard lock(stats_mutex_);
  ++stats_.operations;
  if (!op.single && op.count > 1) stats_.merged_pages += op.count;
}

// An operation that the engine never saw ends with its transfer, or with the disk.
void IoExecutor::drop_queued() {
  std::erase_if(queued_, [this](std::uint32_t index) {
    if (may_go_on(ops_[index])) return false;
    finish(ops_[index]);
    return true;
  });
}

// ---- results -----------------------------------------------------------------------------------------------------

void IoExecutor::handle(const IoResult& result) {
  Op& op = ops_[result.tag];
  if (op.single) {
    if (handle_single(op, result.result)) return;
  } else if (op.count > 1 && !complete(op, result.result)) {
    op.single = true;
    if (!may_go_on(op)) return finish(op);
    submit(op);
    return;
  } else {
    const auto each = op.count > 1 ? static_cast<std::int64_t>(host_.page_bytes()) : result.result;
    for (std::uint32_t i = 0; i < op.count; ++i) op.status[i] = conclude(op, i, each);
  }
  finish(op);
}

// True: the operation goes on with its next page.
bool IoExecutor::handle_single(Op& op, std::int64_t result) {
  op.status[op.at] = conclude(op, op.at, result);
  if (++op.at == op.count || !may_go_on(op)) return false;
  submit(op);
  return true;
}

// False: the rest of the operation is settled, because its transfer ended or the disk went out of service.
bool IoExecutor::may_go_on(Op& op) {
  const PageStatus ended = op.transfer->ended.load(std::memory_order_relaxed);
  const PageStatus why = offline_ ? PageStatus::kOffline : ended;
  if (why == PageStatus::kPending) return true;
  std::fill(op.status + op.at, op.status + op.count, why);
  return false;
}

PageStatus IoExecutor::conclude(Op& op, std::uint32_t i, std::int64_t result) {
  const bool whole = result == static_cast<std::int64_t>(host_.page_bytes());
  if (!op.hung) note_health(whole, op.lane == Lane::kStage ? "reading" : "writing", disk_slot(op, i), result);
  return op.lane == Lane::kStage ? conclude_read(op, i, result) : conclude_write(op, i, result);
}

PageStatus IoExecutor::conclude_read(const Op& op, std::uint32_t i, std::int64_t result) {
  if (result < 0) return PageStatus::kReadError;
  if (result != static_cast<std::int64_t>(host_.page_bytes())) return PageStatus::kShortRead;
  const Transfer& t = *op.transfer;
  if (t.ended.load(std::memory_order_relaxed) == PageStatus::kCancelled) return PageStatus::kCancelled;
  const PageIdentity* identity = t.identity(op.pages[i]);
  const Slot host = host_slot(op, i);
  const bool right =
      !options_.verify || checksum(host_.page(host), host_.payload_bytes(), checksum_key(*identity)) == op.expected[i];
  // The record may have gone while the page was read: invalidated, or its slot written over.
  if (store_.checksum_for(disk_slot(op, i), identity) != op.expected[i]) return PageStatus::kStale;
  if (!right) return PageStatus::kCorrupt;
  host_.checksum(host) = op.expected[i];
  return PageStatus::kOk;
}

PageStatus IoExecutor::conclude_write(const Op& op, std::uint32_t i, std::int64_t result) {
  if (result != static_cast<std::int64_t>(host_.page_bytes())) return PageStatus::kWriteError;  // record stays cleared
  const Transfer& t = *op.transfer;
  if (t.ended.load(std::memory_order_relaxed) == PageStatus::kCancelled) return PageStatus::kCancelled;
  const PageIdentity* identity = t.identity(op.pages[i]);
  const Slot host = host_slot(op, i), disk = disk_slot(op, i);
  std::uint64_t sum = host_.checksum(host);
  if (sum == 0) sum = checksum(host_.page(host), host_.payload_bytes(), checksum_key(*identity));  // not gather's page
  const Blocking here(*this);
  const int rc = store_.write_record(disk, identity, sum);
  if (rc == 0) return PageStatus::kOk;
  if (rc == -ESTALE) return PageStatus::kStale;  // invalidated meanwhile, the host page too; the disk is not to blame
  note_health(false, "writing the record of", disk, rc);
  store_.clear_record(disk);
  return PageStatus::kWriteError;
}

void IoExecutor::finish(Op& op) {
  scheduler_.finish(*op.transfer, op.hop, {op.pages, op.count}, op.status, !op.released);
  op.in_use = false;
  free_.push_back(static_cast<std::uint32_t>(&op - ops_.data()));
}

// ---- faults ------------------------------------------------------------------------------------------------------

void IoExecutor::check_hung(Time now) {
  for (Op& op : ops_) {
    if (!op.in_use || op.hung || op.queued || op.landed || now - op.started < options_.io_limit) continue;
    op.hung = op.released = true;
    {
      const std::lock_guard lock(stats_mutex_);
      ++stats_.hung;
    }
    scheduler_.stalled(*op.transfer, op.lane, op.count);
    note_health(false, op.lane == Lane::kStage ? "reading" : "writing", disk_slot(op, op.at), -ETIMEDOUT);
  }
}

// The end of the mover, with operations that do not return. The engine lets go of them; the memory stays (stuck()).
void IoExecutor::abandon() {
  for (Op& op : ops_) {
    if (!op.in_use) continue;
    if (!op.queued) stuck_.store(true);
    std::fill(op.status + op.at, op.status + op.count, PageStatus::kCancelled);
    finish(op);
  }
}

void IoExecutor::note_health(bool ok, const char* what, Slot slot, std::int64_t result) {
  if (!health_.note(ok) || offline_) return;
  go_offline([&] {
    return std::to_string(health_.failures()) + " of the last " + std::to_string(health_.samples()) +
           " operations failed, the last one " + what + " slot " + std::to_string(slot) + " (" +
           (result < 0 ? std::strerror(static_cast<int>(-result)) : "short transfer") +
           "); its pages are misses until the store is opened again";
  });
}

// False: it was already.
template <class Why>
bool IoExecutor::go_offline(const Why& why) {
  if (offline_.exchange(true)) return false;
  {
    const std::lock_guard lock(stats_mutex_);
    try {
      stats_.warning = kOutOfService + why();
    } catch (const std::bad_alloc&) {
      unexplained_ = true;
    }
  }
  scheduler_.take_disk_offline();
  return true;
}

}  // namespace kvtier
