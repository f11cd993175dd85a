#include "io/generations.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

namespace kvtier::disk {
namespace {

constexpr std::uint64_t kJournalKey = ~std::uint64_t{0} - 1;

Generations::Space to_space(const std::uint8_t* bytes) {
  Generations::Space space;
  std::copy_n(bytes, space.size(), space.begin());
  return space;
}

bool is_zero(const JournalEntry& entry) {
  static constexpr JournalEntry kZero{};
  return std::memcmp(&entry, &kZero, sizeof(entry)) == 0;
}

}  // namespace

JournalEntry Generations::entry(JournalKind kind, std::uint64_t generation, const std::uint8_t* space,
                                std::uint64_t sequence) const {
  JournalEntry made{0, sequence, kind, generation, {}};
  if (space) std::copy_n(space, sizeof(made.space), made.space);
  made.checksum = checksum(&made.sequence, sizeof(made) - 8, id_, kJournalKey);
  return made;
}

bool Generations::right(const JournalEntry& entry) const {
  return entry.checksum == checksum(&entry.sequence, sizeof(entry) - 8, id_, kJournalKey) &&
         (entry.kind == JournalKind::kSpace || entry.kind == JournalKind::kMinimum) &&
         entry.generation <= kMaxGeneration && entry.sequence <= kMaxSequence;
}

void Generations::apply(const JournalEntry& entry) {
  std::lock_guard lock(mutex_);
  if (entry.kind == JournalKind::kSpace) {
    std::uint64_t& generation = spaces_[to_space(entry.space)];
    generation = std::max(generation, entry.generation);
  } else {
    minimum_ = std::max(minimum_, entry.generation);
    std::erase_if(spaces_, [this](const auto& item) { return item.second <= minimum_; });
  }
}

void Generations::create() { rewrite(); }

std::string Generations::load() {
  file_ = files::open_existing(path(), O_RDWR);
  if (!file_.valid()) return "it is missing";
  if (files::size(file_.get()) != bytes()) {
    return "it has " + std::to_string(files::size(file_.get())) + " bytes, not " + std::to_string(bytes());
  }
  allocated_ = files::allocated(file_.get());
  std::vector<JournalEntry> copies[2];
  for (int i = 0; i < 2; ++i) {
    copies[i].resize(capacity_);
    const std::size_t size = capacity_ * sizeof(JournalEntry);
    const std::int64_t got = files::read_all(file_.get(), copies[i].data(), size, i * copy_bytes(capacity_));
    if (got != static_cast<std::int64_t>(size)) {  // cannot be read, or is cut short: the other copy may do
      copies[i].assign(capacity_, JournalEntry{});
      mended_ = true;
    }
  }
  return adopt(copies[0], copies[1]);
}

// An entry counts wherever it lies. Nothing is lost if no place is damaged in both copies and no number is missing
// between the first and the last. Damaged in one and not written in the other: never completed, or never begun.
std::string Generations::adopt(const std::vector<JournalEntry>& first, const std::vector<JournalEntry>& second) {
  std::vector<std::uint64_t> found;
  std::string wrong;
  for (std::size_t i = 0; i < capacity_; ++i) {
    const bool here[] = {right(first[i]), right(second[i])};
    for (int copy = 0; copy < 2; ++copy) {
      if (!here[copy]) continue;
      const JournalEntry& entry = copy == 0 ? first[i] : second[i];
      apply(entry);
      found.push_back(entry.sequence);
    }
    if (here[0] || here[1]) used_ = i + 1;
    mended_ = mended_ || std::memcmp(&first[i], &second[i], sizeof(JournalEntry)) != 0;
    if (!here[0] && !here[1] && !is_zero(first[i]) && !is_zero(second[i]))
      wrong = "entry " + std::to_string(i) + " is damaged";
  }
  if (mended_) used_ = capacity_;
  if (found.empty()) return wrong.empty() ? "it is empty" : wrong;
  std::sort(found.begin(), found.end());
  sequence_ = found.back();
  for (std::size_t i = 1; i < found.size(); ++i) {
    if (found[i] > found[i - 1] + 1) wrong = "entry number " + std::to_string(found[i - 1] + 1) + " is missing";
  }
  return wrong;
}

void Generations::restart(std::uint64_t highest, std::uint64_t sequence_seen) {
  {
    std::lock_guard lock(mutex_);
    minimum_ = std::max(minimum_, highest) + 1;
    for (const auto& [space, generation] : spaces_) minimum_ = std::max(minimum_, generation + 1);
    spaces_.clear();
  }
  sequence_ = std::max(sequence_.load(), sequence_seen);
  rewrite();
}

std::uint64_t Generations::of(const std::uint8_t* space) const {
  std::lock_guard lock(mutex_);
  if (spaces_.empty()) return minimum_;
  const auto found = spaces_.find(to_space(space));
  return found == spaces_.end() ? minimum_ : std::max(minimum_, found->second);
}

std::uint64_t Generations::highest() const {
  std::lock_guard lock(mutex_);
  std::uint64_t highest = minimum_;
  for (const auto& [space, generation] : spaces_) highest = std::max(highest, generation);
  return highest;
}

std::uint64_t Generations::advance(const std::uint8_t* space) {
  std::lock_guard one_at_a_time(writing_);
  if (behind_.exchange(false)) used_ = capacity_;  // write all anew
  const std::uint64_t generation = (space ? of(space) : highest()) + 1;
  const JournalEntry made =
      entry(space ? JournalKind::kSpace : JournalKind::kMinimum, generation, space, sequence_ + 1);
  try {
    append(made);
  } catch (const std::system_error&) {
    apply(made);
    used_ = capacity_;  // the next one rewrites the journal, and with it what this one could not
    throw;
  }
  apply(made);  // only now: a record that names the new generation must not be older than the journal's entry
  return space ? of(space) : generation;
}

std::uint64_t Generations::advance_here(const std::uint8_t* space) {
  behind_ = true;
  const std::uint64_t generation = (space ? of(space) : highest()) + 1;
  apply(entry(space ? JournalKind::kSpace : JournalKind::kMinimum, generation, space, 0));
  return generation;
}

void Generations::append(const JournalEntry& made) {
  if (used_ == capacity_ || !file_.valid()) {
    apply(made);
    rewrite();
    return;
  }
  check_numbers(made.generation, made.sequence);
  for (const std::uint64_t copy : {std::uint64_t{0}, copy_bytes(capacity_)}) {
    const std::uint64_t at = copy + used_ * sizeof(made);
    files::check(files::write_all(file_.get(), &made, sizeof(made), at), "cannot write " + path());
  }
  files::check(files::sync_data(file_.get()), "cannot make " + path() + " durable");
  sequence_ = made.sequence;
  ++used_;
}

// Nothing is written that right() would not take.
void Generations::check_numbers(std::uint64_t generation, std::uint64_t sequence) const {
  const bool fit = generation <= kMaxGeneration && sequence <= kMaxSequence;
  files::check(fit ? 0 : -EOVERFLOW, "cannot number what follows in " + path());
}

// A new journal with one entry per namespace takes the old one's place in one step.
void Generations::rewrite() {
  std::vector<JournalEntry> entries(capacity_);
  std::size_t used = 0;
  std::uint64_t sequence = sequence_, highest = 0;
  {
    std::lock_guard lock(mutex_);
    if (spaces_.size() > capacity_ / 2) {
      for (const auto& [space, generation] : spaces_) minimum_ = std::max(minimum_, generation);
      ++minimum_;
      spaces_.clear();
    }
    entries[used++] = entry(JournalKind::kMinimum, minimum_, nullptr, ++sequence);
    for (const auto& [space, generation] : spaces_) {
      entries[used++] = entry(JournalKind::kSpace, generation, space.data(), ++sequence);
      highest = std::max(highest, generation);
    }
    highest = std::max(highest, minimum_);
  }
  check_numbers(highest, sequence);
  const std::string fresh = path() + ".new";
  files::Fd file = files::open(fresh, O_RDWR | O_CREAT | O_TRUNC);
  files::check(files::preallocate(file.get(), bytes()), "cannot reserve space for " + fresh);
  for (const std::uint64_t copy : {std::uint64_t{0}, copy_bytes(capacity_)}) {
    files::check(files::write_all(file.get(), entries.data(), entries.size() * sizeof(JournalEntry), copy),
                 "cannot write " + fresh);
  }
  files::check(files::sync_data(file.get()), "cannot make " + fresh + " durable");
  files::check(files::rename_over(fresh, path()), "cannot put " + fresh + " in place");
  file_ = std::move(file);
  allocated_ = files::allocated(file_.get());
  used_ = used;
  sequence_ = sequence;
  files::check(files::sync_directory(dir_), "cannot make " + path() + " durable");
}

}  // namespace kvtier::disk
