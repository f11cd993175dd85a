#include "cuda/emulated.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common/forks.hpp"

namespace kvtier::cuda {
Emulated::Emulated(std::uint64_t seed, bool watch, const Faults& faults)
    : watch_(watch), faults_(faults), process_(fork_generation()), random_(seed) {
  facts_.name = "an emulated device";
  facts_.processors = 132;
  facts_.batches = facts_.emulated = true;
  const std::lock_guard lock(mutex_);
  queues_[nullptr] = std::make_shared<Queue>();
  queues_[nullptr]->agent = agents_++;
  thread_ = std::thread([this] { run(); });
}

Emulated::~Emulated() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
  for (const auto& [memory, bytes] : memory_) std::free(memory);
}

// ---- queues ------------------------------------------------------------------------------------------------------

const std::shared_ptr<Emulated::Queue>& Emulated::queue_of(Stream stream) {
  const auto found = queues_.find(stream);
  if (found == queues_.end() || found->second->freed) throw Error("CUDA_ERROR_INVALID_HANDLE: no such stream");
  return found->second;
}

// Every call that the driver may refuse, or let wait, begins here.
std::unique_lock<std::mutex> Emulated::entered() {
  if (process_ != fork_generation()) throw Error("an emulated device works only in its own process, not after fork()");
  std::unique_lock lock(mutex_);
  ++stalled_;
  changed_.wait(lock, [&] { return !stalls_; });
  --stalled_;
  if (++calls_ == faults_.refuse_call) throw Error("CUDA_ERROR_UNKNOWN: refused on purpose");
  return lock;
}

void Emulated::push(Stream stream, Work work) {
  Queue& queue = *queue_of(stream);
  work.host = host_;
  queue.work.push_back(std::move(work));
  changed_.notify_all();
}

void Emulated::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Queue* queue = nullptr;
    changed_.wait(lock, [&] { return stop_ || (queue = choose()) != nullptr; });
    if (stop_) return;
    perform(*queue, lock);
    std::erase_if(queues_, [](const auto& each) { return each.second->has_run_out(); });
    changed_.notify_all();
  }
}

Emulated::Queue* Emulated::choose() {
  const auto may_run = [](const Queue& queue) {
    if (queue.held || queue.busy || queue.work.empty()) return false;
    const std::shared_ptr<Mark>& mark = queue.work.front().waits_for;
    return mark == nullptr || mark->passed;
  };
  std::size_t ready = 0;
  for (const auto& [stream, queue] : queues_) ready += may_run(*queue);
  if (ready == 0) return nullptr;
  std::size_t before = random_() % ready;  // of those that may run
  for (const auto& [stream, queue] : queues_) {
    if (may_run(*queue) && before-- == 0) return queue.get();
  }
  return nullptr;
}

void Emulated::perform(Queue& queue, std::unique_lock<std::mutex>& lock) {
  Work work = std::move(queue.work.front());
  queue.work.pop_front();
  queue.busy = true;
  queue.clock.join(work.host);
  if (work.waits_for) queue.clock.join(work.waits_for->clock);
  queue.clock.tick(queue.agent);
  if (watch_) {
    for (const Use& use : work.uses) uses_.note(work.name, queue.agent, queue.clock, use);
  }
  if (work.is_call) lock.unlock();
  if (work.run) work.run();
  if (work.is_call) lock.lock();
  if (work.records) {
    work.records->clock = queue.clock;
    work.records->passed = true;
  }
  queue.busy = false;
}

// A kernel reaches the device's memory, and of the host's what is pinned.
void Emulated::check_reached(const std::string& name, const Use& page) {
  const bool reached = where(pins_, page.memory, page.bytes) == Where::kInside ||
                       where(memory_, page.memory, page.bytes) == Where::kInside;
  if (!reached) uses_.tell(name + " touches a page that is not pinned");
}

void Emulated::check_registrations(const Work& work) {
  for (const Use& use : work.uses) {
    if (where(pins_, use.memory, use.bytes) == Where::kAcross)
      uses_.tell(work.name + " reaches over a registration's end");
  }
}

// ---- the runtime -------------------------------------------------------------------------------------------------

Stream Emulated::make_stream() {
  const auto lock = entered();
  const auto stream = reinterpret_cast<Stream>(next_name_++);
  queues_[stream] = std::make_shared<Queue>();
  queues_[stream]->agent = agents_++;
  return stream;
}

// As the driver: at once, and what is queued there runs nevertheless.
void Emulated::free_stream(Stream stream) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = queues_.find(stream);
  if (found == queues_.end()) return;
  found->second->freed = true;
  if (found->second->has_run_out()) queues_.erase(found);
}

Event Emulated::make_event() {
  const auto lock = entered();
  const auto event = reinterpret_cast<Event>(next_name_++);
  events_[event] = nullptr;
  return event;
}

void Emulated::free_event(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

void Emulated::record(Event event, Stream stream) {
  const auto lock = entered();
  std::shared_ptr<Mark>& last = events_.at(event);
  const auto mark = std::make_shared<Mark>();
  Work work;
  work.name = "a record";
  work.records = mark;
  push(stream, std::move(work));
  last = mark;  // not where that was refused: the event is what it was
}

void Emulated::wait(Stream stream, Event event) {
  const auto lock = entered();
  if (++waits_ == faults_.skip_wait) return;
  const std::shared_ptr<Mark> mark = events_.at(event);
  if (mark == nullptr) return;  // never recorded: nothing to wait for, as the driver has it
  Work work;
  work.name = "a wait";
  work.waits_for = mark;
  push(stream, std::move(work));
}

bool Emulated::done(Event event) {
  const auto lock = entered();
  const std::shared_ptr<Mark> mark = events_.at(event);
  if (mark == nullptr) return true;
  if (!mark->passed) return ++looks_ == faults_.early_done;
  host_.join(mark->clock);
  return true;
}

bool Emulated::record_behind(Event event, Stream engine) {
  {
    const auto lock = entered();
    if (queue_of(engine)->captured) return false;
  }
  record(event, engine);
  const std::lock_guard lock(mutex_);
  return !queue_of(engine)->captured;  // it may have begun meanwhile
}

void Emulated::capture(Stream stream, bool on) {
  const std::lock_guard lock(mutex_);
  queue_of(stream)->captured = on;
}

void Emulated::count_order() {
  if (++orders_ == faults_.refuse) throw Error("CUDA_ERROR_UNKNOWN: refused on purpose");
}

void Emulated::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  const auto lock = entered();
  count_order();
  Work work;
  work.name = "a copy";
  work.uses = {{from, bytes, false}, {to, bytes, true}};
  check_registrations(work);
  work.run = [=] { std::memcpy(to, from, bytes); };
  push(stream, std::move(work));
}

// The list is read when the copies run, which is later than the driver does it: a list that is changed too early shows.
void Emulated::copy_list(const CopyList& list, Stream stream) {
  const auto lock = entered();
  count_order();
  Work work;
  work.name = "a list of copies";
  for (std::size_t i = 0; i < list.size(); ++i) {
    work.uses.push_back({reinterpret_cast<void*>(list.from[i]), list.bytes[i], false});
    work.uses.push_back({reinterpret_cast<void*>(list.to[i]), list.bytes[i], true});
  }
  check_registrations(work);
  work.run = [this, &list, then = list] {
    if (list.to != then.to || list.from != then.from || list.bytes != then.bytes) {
      uses_.tell("a list of copies was changed before they ran");
      return;
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      std::memcpy(reinterpret_cast<void*>(list.to[i]), reinterpret_cast<void*>(list.from[i]), list.bytes[i]);
    }
  };
  push(stream, std::move(work));
}

void Emulated::launch(Kernel kernel, const PageLaunch& launch, unsigned blocks, Stream stream) {
  const auto lock = entered();
  count_order();
  Work work;
  work.name = kernel_name(kernel);
  if (watch_) {
    LaunchUses uses = uses_of(kernel, launch, blocks);
    for (std::size_t i = 0; i < uses.pages; ++i) check_reached(work.name, uses.all[i]);
    work.uses = std::move(uses.all);
  }
  work.run = [=] { run_on_cpu(kernel, launch, blocks); };
  push(stream, std::move(work));
}

void Emulated::call(Stream stream, void (*function)(void*), void* context) {
  const auto lock = entered();
  Work work;
  work.name = "a call";
  work.run = [=] { function(context); };
  work.is_call = true;
  push(stream, std::move(work));
}

void Emulated::finish(Stream stream) {
  auto lock = entered();
  const std::shared_ptr<Queue> queue = queue_of(stream);  // which another thread may free meanwhile
  changed_.wait(lock, [&] { return queue->work.empty() && !queue->busy; });
  host_.join(queue->clock);
}

void* Emulated::device_memory(std::size_t bytes) {
  const auto lock = entered();
  const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
  void* memory = std::aligned_alloc(4096, rounded);
  if (memory == nullptr) throw Error("CUDA_ERROR_OUT_OF_MEMORY");
  std::memset(memory, 0xCC, rounded);
  memory_[memory] = rounded;
  return memory;
}

void Emulated::free_device(void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  uses_.forget(memory, memory_[memory]);
  memory_.erase(memory);
  std::free(memory);
}

void Emulated::pin(void* memory, std::size_t bytes) {
  const auto lock = entered();
  ++pin_calls_;
  if (faults_.refuse_pin != 0 && pin_calls_ >= faults_.refuse_pin) throw Error("CUDA_ERROR_OUT_OF_MEMORY: on purpose");
  pins_[memory] = bytes;
}

void Emulated::unpin(void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = pins_.find(memory);
  if (found == pins_.end()) return;
  Regions going;
  going[memory] = found->second;
  pins_.erase(found);
  for (const auto& [stream, queue] : queues_) {
    for (const Work& work : queue->work) {
      const bool uses = std::any_of(work.uses.begin(), work.uses.end(), [&](const Use& use) {
        return where(going, use.memory, use.bytes) != Where::kOutside;
      });
      if (uses) uses_.tell("memory is unpinned that " + work.name + " has yet to use");
    }
  }
}

bool Emulated::owns(const void*, std::string*) {
  const auto lock = entered();
  return true;
}

// ---- the engine's side, the test's side ---------------------------------------------------------------------------

void Emulated::host_uses(const void* memory, std::size_t bytes, bool writes) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    host_.tick(0);
    if (watch_) uses_.note("the host", 0, host_, {memory, bytes, writes});
  } catch (const std::bad_alloc&) {
    uses_.missed();
  }
}

void Emulated::compute(Stream stream, std::vector<Use> uses, std::function<void()> body) {
  const std::lock_guard lock(mutex_);
  Work work;
  work.name = "the engine's step";
  work.uses = std::move(uses);
  work.run = std::move(body);
  push(stream, std::move(work));
}

void Emulated::hold(Stream stream, bool held) {
  const std::lock_guard lock(mutex_);
  queue_of(stream)->held = held;
  changed_.notify_all();
}

void Emulated::stall(bool on) {
  const std::lock_guard lock(mutex_);
  stalls_ = on;
  changed_.notify_all();
}

unsigned Emulated::stalled() const {
  const std::lock_guard lock(mutex_);
  return stalled_;
}

void Emulated::run_out() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const auto& each) { return each.second->work.empty() && !each.second->busy; });
  });
}

std::vector<Stream> Emulated::streams() const {
  const std::lock_guard lock(mutex_);
  std::vector<Stream> found;
  for (const auto& [stream, queue] : queues_) {
    if (stream != nullptr && !queue->freed) found.push_back(stream);
  }
  return found;  // names rise
}

std::vector<std::string> Emulated::races() const {
  const std::lock_guard lock(mutex_);
  return uses_.found();
}
std::uint64_t Emulated::waits() const {
  const std::lock_guard lock(mutex_);
  return waits_;
}
std::uint64_t Emulated::looks() const {
  const std::lock_guard lock(mutex_);
  return looks_;
}
std::uint64_t Emulated::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}
std::uint64_t Emulated::orders() const {
  const std::lock_guard lock(mutex_);
  return orders_;
}
std::size_t Emulated::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [memory, bytes] : pins_) sum += bytes;
  return sum;
}
std::size_t Emulated::allocated() const {
  return streams().size() + [this] {
    const std::lock_guard lock(mutex_);
    return memory_.size() + events_.size();
  }();
}

}  // namespace kvtier::cuda
