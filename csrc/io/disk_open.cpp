// Opening a DiskStore: the checks, the lock, creation and recovery. What a store does once it is open is in
// disk_store.cpp.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "io/disk_store.hpp"

namespace kvtier {
namespace {

using disk::kBlock;

constexpr std::size_t kMaxPayload = std::size_t{1} << 30;  // one transfer
constexpr std::size_t kMaxLabel = std::size_t{1} << 20;

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

std::string in_mib(std::uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

const DiskOptions& checked(const DiskOptions& options) {
  const auto number = [](auto value) { return std::to_string(value); };
  if (options.slots == 0 || options.slots == kNoSlot)
    refuse("disk slots " + number(options.slots) + ": 1 to 4294967294 are possible");
  if (options.payload_bytes == 0 || options.payload_bytes > kMaxPayload) {
    refuse("disk payload_bytes " + number(options.payload_bytes) + ": 1 to " + number(kMaxPayload) + " are possible");
  }
  if (options.label_bytes == 0 || options.label_bytes % 4 != 0 || options.label_bytes > kMaxLabel) {
    refuse("disk label_bytes " + number(options.label_bytes) + ": a multiple of 4 from 4 to " + number(kMaxLabel) +
           " is possible");
  }
  if (options.rank >= options.world) {
    refuse("disk rank " + number(options.rank) + ": must be below world, " + number(options.world));
  }
  if (options.journal_entries < disk::kMinJournal || options.journal_entries > disk::kMaxJournal) {
    refuse("disk journal_entries " + number(options.journal_entries) + ": " + number(disk::kMinJournal) + " to " +
           number(disk::kMaxJournal) + " are possible");
  }
  return options;
}

std::string hex(const std::uint8_t* bytes, std::size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

constexpr char kOneEach[] = "; expected a directory of its own for each cache";

// A number that no other process draws, also where process ids repeat, as in containers.
std::uint64_t process_token() {
  static const std::uint64_t token = [] {
    std::uint64_t drawn = 0;
    return ::getrandom(&drawn, sizeof(drawn), 0) == static_cast<ssize_t>(sizeof(drawn)) ? drawn : 0;
  }();
  return token;
}

std::string process_name() { return std::to_string(::getpid()) + " " + std::to_string(process_token()) + "\n"; }

// Who holds the lock file, by what it wrote there.
std::string holder(int lock) {
  char text[64] = {};
  files::read_all(lock, text, sizeof(text) - 1, 0);
  if (text == process_name()) return "this process";
  const long pid = std::strtol(text, nullptr, 10);
  return "another process" + (pid > 0 ? " (pid " + std::to_string(pid) + ")" : "");
}

// True if `path` still is the file behind `fd` (it may have been removed and made anew before we had the lock).
bool is_at(int fd, const std::string& path) {
  struct stat ours{};
  struct stat there{};
  return ::fstat(fd, &ours) == 0 && ::stat(path.c_str(), &there) == 0 && ours.st_ino == there.st_ino &&
         ours.st_dev == there.st_dev;
}

// Also for a link that leads nowhere.
bool lies_at(const std::string& path) {
  struct stat info{};
  return ::lstat(path.c_str(), &info) == 0;
}

}  // namespace

DiskStore::DiskStore(const DiskOptions& options)
    : options_(checked(options)),
      footprint_(DiskFootprint::of(options.payload_bytes, options.label_bytes, options.journal_entries)) {
  scratch_.resize(footprint_.record_bytes);
}

void DiskStore::refuse_path(const std::string& why) const { refuse("disk.path: " + options_.dir + ": " + why); }

DiskStore::~DiskStore() = default;  // closing the files gives up the locks

void DiskStore::close() {
  slab_ = files::Fd();
  table_ = files::Fd();
  lock_ = files::Fd();
}

std::unique_ptr<DiskStore> DiskStore::open(const DiskOptions& options) {
  std::unique_ptr<DiskStore> store(new DiskStore(options));
  check_directory(options.dir);
  store->lock_directory();
  const bool exists = lies_at(store->path("table"));
  try {
    store->table_ = files::open_existing(store->path("table"), O_RDWR);
    store->choose_io();
    store->entries_.resize(options.slots);
    // A slab and a journal without a table are what a creation that was cut short left; the table comes last.
    store->table_.valid() ? store->reopen() : store->write_new_files();
  } catch (...) {
    if (!exists) store->remove_new_files();
    throw;
  }
  return store;
}

void DiskStore::choose_io() {
  probe_ = probe(options_.dir);
  if (options_.direct == DirectIo::kOn && !probe_.direct) {
    refuse("disk.direct: \"on\": " + probe_.why + "; expected \"auto\" or \"off\"");
  }
  direct_ = probe_.direct && options_.direct != DirectIo::kOff;
}

void DiskStore::lock_directory() {
  const std::string where = path("lock");
  for (int attempt = 0; attempt < 10; ++attempt) {
    lock_ = files::open(where, O_RDWR | O_CREAT);
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) refuse_path("in use by " + holder(lock_.get()) + kOneEach);
    if (!is_at(lock_.get(), where)) continue;
    try {
      const std::string name = process_name();
      files::check(files::truncate(lock_.get(), 0), "cannot write " + where);
      files::check(files::write_all(lock_.get(), name.data(), name.size(), 0), "cannot write " + where);
    } catch (...) {
      if (!lies_at(path("table"))) ::unlink(where.c_str());  // no store: nothing stays behind
      throw;
    }
    return;
  }
  refuse_path("its lock file keeps changing; expected a directory that nothing else cleans");
}

void DiskStore::check_space(std::uint64_t present) const {
  struct statvfs fs{};
  if (::statvfs(options_.dir.c_str(), &fs) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot examine " + options_.dir);
  }
  const std::uint64_t free = std::uint64_t{fs.f_bavail} * fs.f_frsize;
  const std::uint64_t whole = footprint_.bytes(options_.slots);
  const std::uint64_t needed = whole - std::min(present, whole);
  if (needed > free) {
    refuse("disk.size: " + std::to_string(options_.slots) + " pages need " + in_mib(needed) + " more in " +
           options_.dir + ", where " + in_mib(free) + " are free; expected a smaller size, or more free space");
  }
}

disk::Header DiskStore::make_header() const {
  disk::Header header{};
  std::memcpy(header.magic, disk::kMagic, sizeof(header.magic));
  header.version = disk::kVersion;
  header.journal_entries = options_.journal_entries;
  header.id = id_;
  header.slots = options_.slots;
  header.payload_bytes = options_.payload_bytes;
  header.page_bytes = footprint_.page_bytes;
  header.record_bytes = footprint_.record_bytes;
  header.label_bytes = options_.label_bytes;
  std::memcpy(header.geometry_tag, options_.geometry_tag, sizeof(header.geometry_tag));
  header.rank = options_.rank;
  header.world = options_.world;
  header.checksum = disk::header_checksum(header);
  return header;
}

void DiskStore::write_new_files() {
  if (::getrandom(&id_, sizeof(id_), 0) != static_cast<ssize_t>(sizeof(id_))) {
    throw std::system_error(errno, std::generic_category(), "no random bytes for a new disk store");
  }
  slab_ = files::open(path("slab"), O_RDWR | O_CREAT | (direct_ ? O_DIRECT : 0));
  check_space(files::allocated(slab_.get()));
  files::check(files::preallocate(slab_.get(), slab_bytes()),
               "cannot reserve " + in_mib(slab_bytes()) + " for " + path("slab"));
  generations_ = std::make_shared<disk::Generations>(options_.dir, id_, options_.journal_entries);
  generations_->create();

  const std::string fresh = path("table.new");
  table_ = files::open(fresh, O_RDWR | O_CREAT | O_TRUNC);
  files::check(files::preallocate(table_.get(), table_bytes()),
               "cannot reserve " + in_mib(table_bytes()) + " for " + fresh);
  if (::flock(table_.get(), LOCK_EX | LOCK_NB) != 0) refuse_path(std::string("in use by another process") + kOneEach);
  const disk::Header header = make_header();
  files::check(files::write_all(table_.get(), &header, sizeof(header), 0), "cannot write " + fresh);
  files::check(files::sync_data(table_.get()), "cannot make " + fresh + " durable");
  files::check(files::rename_over(fresh, path("table")), "cannot put " + fresh + " in place");
  files::check(files::sync_directory(options_.dir), "cannot make " + path("table") + " durable");
}

void DiskStore::remove_new_files() {
  for (const char* name : {"table", "table.new", "generations", "generations.new", "slab", "lock"}) {
    ::unlink(path(name).c_str());
  }
}

void DiskStore::check_header(const disk::Header& header) const {
  const std::string anew = "delete the files in it to start anew";
  const std::string remedy = "; expected the store as it was made; open it so, or " + anew;
  if (std::memcmp(header.magic, disk::kMagic, sizeof(header.magic)) != 0) {
    refuse_path(
        "its file \"table\" is not that of a kvtier disk store; expected another directory, or that file deleted to "
        "start anew");
  }
  if (header.version != disk::kVersion) {
    refuse_path("a store of version " + std::to_string(header.version) + "; expected version " +
                std::to_string(disk::kVersion) + "; " + anew);
  }
  if (header.checksum != disk::header_checksum(header)) {
    refuse_path("the header of its table is damaged (its checksum is wrong); " + anew);
  }
  const disk::Header wanted = make_header();
  // The cause before its consequences: with another geometry the sizes and the number of slots differ too.
  if (std::memcmp(header.geometry_tag, wanted.geometry_tag, sizeof(wanted.geometry_tag)) != 0) {
    refuse_path("holds the pages of another geometry (other layers, heads, dtype or layout): tag " +
                hex(header.geometry_tag, 8) + "... is stored, " + hex(wanted.geometry_tag, 8) + "... is wanted" +
                remedy);
  }
  const struct {
    const char* name;
    std::uint64_t stored;
    std::uint64_t wanted;
  } fields[] = {
      {"payload_bytes", header.payload_bytes, wanted.payload_bytes},
      {"page_bytes", header.page_bytes, wanted.page_bytes},
      {"label_bytes", header.label_bytes, wanted.label_bytes},
      {"record_bytes", header.record_bytes, wanted.record_bytes},
      {"rank", header.rank, wanted.rank},
      {"world", header.world, wanted.world},
      {"journal_entries", header.journal_entries, wanted.journal_entries},
  };
  for (const auto& field : fields) {
    if (field.stored == field.wanted) continue;
    refuse_path("holds a store with " + std::string(field.name) + " " + std::to_string(field.stored) + ", " +
                std::to_string(field.wanted) + " is wanted" + remedy);
  }
  if (header.slots != wanted.slots) {
    refuse("disk.size: " + std::to_string(wanted.slots) + " pages wanted, but the store in " + options_.dir + " has " +
           std::to_string(header.slots) + "; expected the size that it was made with; or " + anew);
  }
}

void DiskStore::reopen() {
  // The directory's lock file may have been deleted under its holder; the table itself is held too.
  if (::flock(table_.get(), LOCK_EX | LOCK_NB) != 0) {
    refuse_path(std::string("in use, though its lock file was removed") + kOneEach);
  }
  disk::Header header{};
  const std::int64_t got = files::read_all(table_.get(), &header, sizeof(header), 0);
  files::check(static_cast<int>(std::min<std::int64_t>(got, 0)), "cannot read " + path("table"));
  if (got != static_cast<std::int64_t>(sizeof(header))) {
    refuse_path("of its table's header only " + std::to_string(got) +
                " of 4096 bytes are there; delete the files in it to start anew");
  }
  check_header(header);
  id_ = header.id;

  slab_ = files::open(path("slab"), O_RDWR | O_CREAT | (direct_ ? O_DIRECT : 0));
  const std::uint64_t slab_found = files::size(slab_.get());
  const std::uint64_t table_found = files::size(table_.get());
  if (slab_found < slab_bytes()) note("slab was cut to " + in_mib(slab_found) + ": the pages beyond are gone");
  if (table_found < table_bytes()) {
    note("table was cut: the records beyond are gone");
    // Of one that was cut in its zeros, the zeros that follow would make a whole record again, after all was settled.
    const std::uint64_t records = (table_found - kBlock) / footprint_.record_bytes;
    files::check(files::truncate(table_.get(), kBlock + records * footprint_.record_bytes),
                 "cannot cut " + path("table"));
  }
  check_space(files::allocated(slab_.get()) + files::allocated(table_.get()));

  generations_ = std::make_shared<disk::Generations>(options_.dir, id_, options_.journal_entries);
  files::check(files::remove(path("generations.new")), "cannot remove " + path("generations.new"));
  files::check(files::remove(path("table.new")), "cannot remove " + path("table.new"));
  const std::string damage = generations_->load();
  load_records(table_found, slab_found);
  adopt_generations(damage);
  files::check(files::preallocate(table_.get(), table_bytes()), "cannot reserve space for " + path("table"));
  files::check(files::preallocate(slab_.get(), slab_bytes()), "cannot reserve space for " + path("slab"));
}

void DiskStore::load_records(std::uint64_t table_found, std::uint64_t slab_found) {
  std::vector<Slot> lost;  // records that may name no page any more: see below
  for_each_record(std::min(table_found, table_bytes()), [&](Slot slot, const disk::RecordHead* head) {
    entries_[slot].generation = 1;
    if (!head) return;
    const PageIdentity* identity = disk::record_identity(head);
    if (identity->generation > disk::kMaxGeneration || head->page_checksum == 0) return;
    if (head->sequence > disk::kMaxSequence || head->journal > disk::kMaxSequence) return;
    sequence_ = std::max(sequence_, head->sequence);
    highest_generation_ = std::max(highest_generation_, identity->generation);
    highest_journal_ = std::max(highest_journal_, head->journal);
    // A generation that was in force in a process and never durable will be given out again.
    const std::uint64_t valid = generations_->of(identity->space);
    if (offset(slot) + footprint_.page_bytes > slab_found || identity->generation > valid) {
      lost.push_back(slot);
      return;
    }
    if (identity->generation != valid) return;
    Entry& entry = entries_[slot];
    entry = Entry{head->page_checksum, identity->generation, {0, 0}};
    std::memcpy(entry.digest, identity->digest, sizeof(entry.digest));
    ++adopted_;
  });
  // Before the slab is made whole again: zeros must not be taken for pages by a later opening.
  for (const Slot slot : lost) files::check(clear_record(slot), "cannot clear a record of " + path("table"));
  // And before the generation is given out again: a loss of power must not bring them back.
  if (!lost.empty()) files::check(files::sync_data(table_.get()), "cannot make " + path("table") + " durable");
}

void DiskStore::adopt_generations(const std::string& damage) {
  std::string wrong = damage;
  if (wrong.empty() && highest_journal_ > generations_->sequence()) wrong = "its end is missing";
  if (wrong.empty()) {
    if (generations_->mended()) note("generations: one of its two copies was damaged; the other was right");
    return;
  }
  // It cannot be known what was invalidated, so everything is.
  generations_->restart(highest_generation_, highest_journal_);
  for (Entry& entry : entries_) {
    if (entry.checksum != 0) entry = Entry{0, 1, {0, 0}};
  }
  note("generations: " + wrong + ", so all " + std::to_string(adopted_) + " pages were dropped");
  adopted_ = 0;
}

void DiskStore::note(const std::string& text) { notes_ += (notes_.empty() ? "" : "; ") + text; }

}  // namespace kvtier
