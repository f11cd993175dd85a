#include "cuda/copier.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "copy/checksum.hpp"

namespace kvtier::cuda {

// Events that are used again and again. They outlive the copier as long as a transfer holds one.
class Copier::FencePool {
 public:
  explicit FencePool(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  OwnedEvent take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        OwnedEvent event = std::move(free_.back());
        free_.pop_back();
        return event;
      }
    }
    OwnedEvent event = make_event(*runtime_);
    const std::lock_guard lock(mutex_);
    free_.reserve(made_ + 1);
    ++made_;
    return event;
  }
  void give(OwnedEvent event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));  // there is room for all that were made
  }
  std::uint64_t number() {
    const std::lock_guard lock(mutex_);
    return ++number_;
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::mutex mutex_;
  std::vector<OwnedEvent> free_;
  std::size_t made_ = 0;
  std::uint64_t number_ = 0;
};

class Copier::Fence final : public DeviceFence {
 public:
  explicit Fence(std::shared_ptr<FencePool> pool)
      : pool_(std::move(pool)), event_(pool_->take()), number_(pool_->number()) {}
  ~Fence() override { pool_->give(std::move(event_)); }
  Event event() const { return event_.get(); }
  std::uint64_t number() const { return number_; }  // no other fence ever has it, also not one at this address

 private:
  std::shared_ptr<FencePool> pool_;
  OwnedEvent event_;
  std::uint64_t number_;
};

// ---- construction ------------------------------------------------------------------------------------------------

Copier::Copier(std::shared_ptr<Runtime> runtime, const DevicePool& device, HostArena& host,
               std::shared_ptr<const PinnedArena> pinned, const CopierOptions& options)
    : runtime_(std::move(runtime)),
      device_(device),
      host_(host),
      pinned_(std::move(pinned)),
      options_(options),
      shape_(device),
      blocks_(blocks_of(options.processor_share)),
      fences_(std::make_shared<FencePool>(runtime_)) {
  check(device);
  directions_[0].path = options.offload;
  directions_[1].path = options.onboard;
  for (Direction& direction : directions_) {
    if (direction.path == Path::kBatch && !runtime_->facts().batches) direction.path = Path::kPieces;
    make_places(direction);
    direction.stream = make_stream(*runtime_);
  }
  if (options_.host_calls) signals_ = make_stream(*runtime_);
  const std::span<const SegmentEntry> table = shape_.table();
  table_ = device_array<SegmentEntry>(*runtime_, table.size());
  runtime_->copy(table_.get(), table.data(), table.size_bytes(), directions_[0].stream.get());
  runtime_->finish(directions_[0].stream.get());
}

unsigned Copier::blocks_of(double processor_share) const {
  if (!(processor_share > 0 && processor_share <= 1)) {
    throw std::invalid_argument("processor_share = " + std::to_string(processor_share) + ": more than 0, 1 at most");
  }
  return std::max(1u, static_cast<unsigned>(processor_share * runtime_->facts().processors));
}

void Copier::check(const DevicePool& device) const {
  if (options_.places < 1 || options_.places > 64) {
    throw std::invalid_argument("places = " + std::to_string(options_.places) + ": 1 to 64 are possible");
  }
  if (device.payload_bytes() != host_.payload_bytes()) {
    throw std::invalid_argument("device pages have " + std::to_string(device.payload_bytes()) + " bytes, host pages " +
                                std::to_string(host_.payload_bytes()) + ": they must be equal");
  }
  if (&pinned_->arena() != &host_) {
    throw std::invalid_argument("pinned: another arena's memory; expected that of the host tier which is copied");
  }
  for (std::size_t i = 0; i < device.segments().size(); ++i) {
    std::string why;
    if (!runtime_->owns(device.segments()[i].base, &why)) {
      throw std::invalid_argument("segments[" + std::to_string(i) + "] is " + why + ": memory of " +
                                  runtime_->facts().name + " (CUDA device " +
                                  std::to_string(runtime_->facts().ordinal) + ") is needed");
    }
  }
}

void Copier::make_places(Direction& direction) {
  const std::size_t most = std::clamp<std::size_t>(options_.batch_bytes / host_.payload_bytes(), 1, kLaunchPages);
  direction.places = std::vector<Place>(options_.places);
  for (Place& place : direction.places) {
    place.event = make_event(*runtime_);
    place.sums = pinned_array<LaneSum>(*runtime_, sum_entries(blocks_));
    if (direction.path == Path::kStaged) place.staging = device_array<std::byte>(*runtime_, most * host_.page_bytes());
    place.pages.reserve(kLaunchPages);
    place.copies.reserve(kLaunchPages * device_.segments().size());
  }
}

Copier::~Copier() = default;

// ---- order -------------------------------------------------------------------------------------------------------

std::shared_ptr<DeviceFence> Copier::fence(std::uintptr_t stream) {
  auto fence = std::make_shared<Fence>(fences_);
  if (!runtime_->record_behind(fence->event(), reinterpret_cast<Stream>(stream))) {
    throw Capturing("the engine's stream is being captured into a graph: submit transfers before or after it");
  }
  return fence;
}

void Copier::start(Lane lane, unsigned number, std::span<PageCopy> pages, ByteRange range, const DeviceFence* fence) {
  Direction& to = direction(lane);
  Place& place = to.places[number];
  place.pages.clear();
  place.range = range;
  place.failed = place.queued = place.recorded = false;
  for (PageCopy& page : pages) {
    if (lane == Lane::kOffload || intact(page)) place.pages.push_back(&page);
  }
  if (place.pages.empty()) return;
  try {
    if (const auto* behind = static_cast<const Fence*>(fence); behind && behind->number() != to.behind) {
      runtime_->wait(to.stream.get(), behind->event());
      to.behind = behind->number();
    }
    place.queued = true;
    queue(lane, to, place);
  } catch (const std::exception& error) {
    fail(place, error.what());
  }
  if (!place.queued) return;
  try {  // also of a batch that was queued in part: what was queued has to end before its pages are anyone's
    record_end(to, place);
    if (!wake_ || !options_.host_calls) return;
    runtime_->wait(signals_.get(), place.event.get());
    runtime_->call(signals_.get(), [](void* self) { static_cast<Copier*>(self)->wake_(); }, this);
  } catch (const std::exception& error) {  // then ended() records, and nobody is called: it is looked for all the same
    remember("could not be followed at once", error.what());
  }
}

void Copier::record_end(Direction& to, Place& place) {
  runtime_->record(place.event.get(), to.stream.get());
  place.recorded = true;
}

// Only two things tell that nothing of a batch runs any more: its event, and a context that runs nothing at all. A
// driver that refuses to say leaves it open.
bool Copier::ended(Lane lane, unsigned number) {
  Direction& to = direction(lane);
  Place& place = to.places[number];
  try {
    if (place.queued && !place.recorded) record_end(to, place);
    if (place.queued && !runtime_->done(place.event.get())) return false;
  } catch (const Broken& error) {
    fail(place, error.what());
  } catch (const std::exception& error) {
    remember("could not be followed at once", error.what());
    return false;
  }
  settle(lane, place);
  return true;
}

bool Copier::wake_by(std::function<void()> wake) {
  wake_ = std::move(wake);
  return options_.host_calls;
}

void Copier::settle(Lane lane, Place& place) {
  if (lane == Lane::kOffload && !place.failed && !place.pages.empty()) {
    runtime_->host_uses(place.sums.get(), sum_entries(blocks_) * sizeof(LaneSum), false);
  }
  for (unsigned i = 0; i < place.pages.size(); ++i) {
    PageCopy& page = *place.pages[i];
    page.status = place.failed ? PageStatus::kWriteError : PageStatus::kOk;
    if (lane == Lane::kOffload && !place.failed) page.checksum = page_checksum(place.launch, blocks_, i);
  }
  place.pages.clear();
}

void Copier::fail(Place& place, const char* why) noexcept {
  place.failed = true;
  remember("failed", why);
}

void Copier::remember(const char* what, const char* why) noexcept {
  const std::lock_guard lock(mutex_);
  if (!note_.empty()) return;
  try {
    note_ = "a copy on " + runtime_->facts().name + " " + what + " (" + why + ")";
  } catch (const std::bad_alloc&) {
    note_ = "a copy failed";  // short enough to need no memory
  }
}

std::string Copier::note() const {
  const std::lock_guard lock(mutex_);
  return note_.empty() ? pinned_->note() : note_;
}

// Looked at before anything is queued, so that a bad page leaves the device block alone.
bool Copier::intact(PageCopy& page) const {
  if (page.checksum == 0 || checksum(host_.page(page.host), device_.payload_bytes(), page.key) == page.checksum) {
    return true;
  }
  page.status = PageStatus::kCorrupt;
  return false;
}

// ---- copies ------------------------------------------------------------------------------------------------------

void Copier::queue(Lane lane, Direction& to, Place& place) {
  const Slot pinned = pinned_->pinned();
  const bool all_pinned = std::all_of(place.pages.begin(), place.pages.end(),
                                      [pinned](const PageCopy* page) { return page->host < pinned; });
  // Only plain copies reach memory that is not pinned. Parts of pages are no runs, for which staging is made.
  const bool part = place.range.size() != host_.payload_bytes();
  switch (!all_pinned ? Path::kPieces : part && to.path == Path::kStaged ? Path::kDirect : to.path) {
    case Path::kPieces:
      return queue_pieces(lane, to, place, false);
    case Path::kBatch:
      return queue_pieces(lane, to, place, true);
    case Path::kDirect:
      return queue_direct(lane, to, place);
    case Path::kStaged:
      return queue_staged(lane, to, place);
  }
}

// By the device's copy engines, which compute no sums: a kernel reads the pages once more, within the device.
void Copier::queue_pieces(Lane lane, Direction& to, Place& place, bool as_list) {
  place.copies.clear();
  if (lane == Lane::kOffload) launch(Way::kSum, to, place, nullptr);
  for (const PageCopy* page : place.pages) {
    std::byte* at = host_.page(page->host);
    if (lane == Lane::kOffload) std::memset(at + host_.payload_bytes(), 0, host_.page_bytes() - host_.payload_bytes());
    std::size_t first = 0;  // of the segment, in the page
    for (const Segment& segment : device_.segments()) {
      const std::size_t begin = std::max(first, place.range.begin);
      const std::size_t end = std::min(first + segment.length, place.range.end);
      if (begin < end) {
        std::byte* const device = segment.at(page->device) + (begin - first);
        lane == Lane::kOffload ? place.copies.add(at + begin, device, end - begin)
                               : place.copies.add(device, at + begin, end - begin);
      }
      first += segment.length;
    }
  }
  if (as_list) return runtime_->copy_list(place.copies, to.stream.get());
  for (std::size_t i = 0; i < place.copies.size(); ++i) {
    runtime_->copy(reinterpret_cast<void*>(place.copies.to[i]), reinterpret_cast<const void*>(place.copies.from[i]),
                   place.copies.bytes[i], to.stream.get());
  }
}

void Copier::queue_direct(Lane lane, Direction& to, Place& place) {
  launch(lane == Lane::kOffload ? Way::kGather : Way::kScatter, to, place, nullptr);
}

void Copier::queue_staged(Lane lane, Direction& to, Place& place) {
  if (lane == Lane::kOffload) {
    launch(Way::kGather, to, place, place.staging.get());
    return queue_runs(lane, to, place);
  }
  queue_runs(lane, to, place);
  launch(Way::kScatter, to, place, place.staging.get());
}

// Pages that are neighbours in the arena, and in one registration, are one copy.
void Copier::queue_runs(Lane lane, Direction& to, Place& place) {
  const std::size_t size = host_.page_bytes();
  for (std::size_t first = 0, last; first < place.pages.size(); first = last) {
    for (last = first + 1; last < place.pages.size(); ++last) {
      const Slot slot = place.pages[last]->host;
      if (slot != place.pages[last - 1]->host + 1 || slot % pinned_->chunk_pages() == 0) break;
    }
    std::byte* const host = host_.page(place.pages[first]->host);
    std::byte* const staged = place.staging.get() + first * size;
    lane == Lane::kOffload ? runtime_->copy(host, staged, (last - first) * size, to.stream.get())
                           : runtime_->copy(staged, host, (last - first) * size, to.stream.get());
  }
}

// `staging`: where the pages lie side by side; null: in the arena.
void Copier::launch(Way way, Direction& to, Place& place, const std::byte* staging) {
  place.launch = shape_.whole(table_.get(), way == Way::kGather ? host_.page_bytes() : 0,
                              way == Way::kScatter ? nullptr : place.sums.get());
  place.launch.begin = place.range.begin;
  place.launch.end = place.range.end;
  for (std::size_t i = 0; i < place.pages.size(); ++i) {
    const PageCopy& page = *place.pages[i];
    const std::byte* at = staging != nullptr ? staging + i * host_.page_bytes() : host_.page(page.host);
    add_page(place.launch, at, page.device, page.key);
  }
  runtime_->launch(shape_.kernel(way), place.launch, blocks_, to.stream.get());
}

}  // namespace kvtier::cuda
