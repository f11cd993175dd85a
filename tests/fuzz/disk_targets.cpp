// The files of a disk store after anything has happened to them.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <system_error>

#include "../cpp/temp_dir.hpp"
#include "fuzz.hpp"
#include "io/disk_format.hpp"
#include "io/disk_store.hpp"
#include "io/files.hpp"
#include "io/generations.hpp"

// Nothing here loses power: a sync would only take the time of a hundred inputs.
extern "C" int fdatasync(int) { return 0; }
extern "C" int fsync(int) { return 0; }

namespace kvtier::fuzz {
namespace {

using Bytes = std::vector<std::byte>;
using Space = disk::Generations::Space;

constexpr disk::StoreId kStore{3, 4};
constexpr std::size_t kLabel = 12;
constexpr std::size_t kRecord = 256;  // record_bytes(kLabel)
constexpr Slot kSlots = 6;
constexpr std::uint32_t kJournal = 8;
constexpr std::uint64_t kJournalKey = ~std::uint64_t{0} - 1;

Bytes read_file(const std::string& path) {
  const files::Fd file = files::open(path, O_RDONLY);
  Bytes bytes(files::size(file.get()));
  require(files::read_all(file.get(), bytes.data(), bytes.size(), 0) == static_cast<std::int64_t>(bytes.size()),
          "cannot read a file back");
  return bytes;
}

void write_file(const std::string& path, const Bytes& bytes) {
  const files::Fd file = files::open(path, O_RDWR | O_CREAT | O_TRUNC);
  files::check(files::write_all(file.get(), bytes.data(), bytes.size(), 0), "cannot write " + path);
}

// A block's identity; the store looks at its digest, namespace and generation only.
struct Named {
  explicit Named(std::uint8_t name, std::uint64_t generation, std::uint8_t space) {
    std::memset(bytes, 0, sizeof bytes);
    PageIdentity head{};
    std::memset(head.digest, name, sizeof head.digest);
    std::memset(head.space, space, sizeof head.space);
    head.generation = generation;
    std::memcpy(bytes, &head, sizeof head);
  }
  const PageIdentity* get() const { return reinterpret_cast<const PageIdentity*>(bytes); }
  alignas(8) std::uint8_t bytes[identity_bytes(kLabel)];
};

void mend_record(Bytes& table, std::size_t at, Slot slot, const disk::StoreId& id) {
  if (table.size() < at + kRecord) return;
  const std::uint64_t sum = disk::checksum(table.data() + at + 8, kRecord - 8, id, slot);
  std::memcpy(table.data() + at, &sum, 8);
}

void mend_entry(Bytes& journal, std::size_t copy, std::size_t index, const disk::StoreId& id) {
  const std::size_t at = copy * disk::Generations::bytes(kJournal) / 2 + index * sizeof(disk::JournalEntry);
  if (journal.size() < at + sizeof(disk::JournalEntry)) return;
  const std::uint64_t sum = disk::checksum(journal.data() + at + 8, sizeof(disk::JournalEntry) - 8, id, kJournalKey);
  std::memcpy(journal.data() + at, &sum, 8);
}

// What a journal says, read the plain way: entries count wherever they lie, none may be damaged in both places, none
// may be missing between the first and the last. Null: something about it is wrong.
std::unique_ptr<std::map<Space, std::uint64_t>> read_journal(const Bytes& bytes, const disk::StoreId& id) {
  if (bytes.size() != disk::Generations::bytes(kJournal)) return nullptr;
  auto said = std::make_unique<std::map<Space, std::uint64_t>>();
  std::set<std::uint64_t> numbers;
  std::uint64_t minimum = 0;
  for (std::uint32_t i = 0; i < kJournal; ++i) {
    int written = 0, good = 0;
    for (const std::size_t copy : {std::size_t{0}, bytes.size() / 2}) {
      const std::byte* const raw = bytes.data() + copy + i * sizeof(disk::JournalEntry);
      disk::JournalEntry entry;
      std::memcpy(&entry, raw, sizeof entry);
      written += std::any_of(raw, raw + sizeof entry, [](std::byte b) { return b != std::byte{0}; });
      if (entry.checksum != disk::checksum(raw + 8, sizeof entry - 8, id, kJournalKey)) continue;
      const bool known = entry.kind == disk::JournalKind::kSpace || entry.kind == disk::JournalKind::kMinimum;
      if (!known || entry.generation > disk::kMaxGeneration || entry.sequence > disk::kMaxSequence) continue;
      ++good;
      numbers.insert(entry.sequence);
      Space space;
      std::copy_n(entry.space, 32, space.begin());
      if (entry.kind == disk::JournalKind::kMinimum)
        minimum = std::max(minimum, entry.generation);
      else
        (*said)[space] = std::max((*said)[space], entry.generation);
    }
    if (written == 2 && good == 0) return nullptr;
  }
  if (numbers.empty() || *numbers.rbegin() - *numbers.begin() + 1 != numbers.size()) return nullptr;
  (*said)[Space{}] = std::max((*said)[Space{}], minimum);
  for (auto& [space, generation] : *said) generation = std::max(generation, minimum);
  return said;
}

// Whether `act` found a number for what it had to write. If there is none left it says so, and writes nothing.
template <class Act>
bool found_a_number(const disk::Generations& journal, const std::string& path, Act act) {
  const Bytes before = read_file(path);
  try {
    act();
    return true;
  } catch (const std::system_error& error) {
    require(error.code().value() == EOVERFLOW, std::string("a journal cannot be written: ") + error.what());
    require(journal.highest() > disk::kMaxGeneration || journal.sequence() + kJournal > disk::kMaxSequence,
            "there were numbers left");
    require(read_file(path) == before, "a journal without numbers was changed");
    return false;
  }
}

}  // namespace

void fuzz_record(Reader& in) {
  const Slot slot = in.byte();
  const disk::RecordHead written{0, in.number(), in.byte(), in.number()};
  const Named named{in.byte(), in.number(), in.byte()};
  Bytes record(kRecord);
  disk::encode_record(record.data(), kRecord, slot, kStore, written, named.get(), kLabel);
  const Bytes before = record;
  const bool mended = in.flag();
  const Slot asked = in.flag() ? in.byte() : slot;
  spoil(in, record);
  record.resize(kRecord);
  if (mended) mend_record(record, 0, asked, kStore);
  const disk::RecordHead* head = disk::decode_record(record.data(), kRecord, asked, kStore);
  const bool right = mended || (record == before && asked == slot);
  require((head != nullptr) == right, right ? "a good record was refused" : "a record was taken that nobody wrote");
  if (head == nullptr) return;
  require(head->checksum != 0, "an empty record was taken");
  require(reinterpret_cast<const std::byte*>(head) == record.data(), "a record's head is not its beginning");
}

std::vector<Input> record_seeds() {
  Input plain(29, 1);
  Input mended = plain, spoiled = plain;
  mended.insert(mended.end(), {1, 1, 9, 1, 2, 40, 0, 1, 2, 3, 4, 5, 6, 7, 8});
  spoiled.insert(spoiled.end(), {0, 0, 1, 0, 100, 0});
  return {plain, mended, spoiled};
}

void fuzz_journal(Reader& in) {
  static const test::TempDir dir;
  const std::string path = dir.path() + "/generations";
  static const Bytes valid = [&] {
    disk::Generations made(dir.path(), kStore, kJournal);
    made.create();
    const Space one{1}, two{2};
    made.advance(one.data());
    made.advance(nullptr);
    made.advance(two.data());
    made.advance(one.data());
    return read_file(path);
  }();
  Bytes journal = valid;
  const std::uint16_t mended = in.half();
  spoil(in, journal);
  for (std::uint32_t i = 0; i < 2 * kJournal; ++i)
    if ((mended >> i & 1) != 0) mend_entry(journal, i / kJournal, i % kJournal, kStore);
  write_file(path, journal);

  const auto said = read_journal(journal, kStore);
  disk::Generations read(dir.path(), kStore, kJournal);
  const std::string wrong = read.load();
  require(wrong.empty() == (said != nullptr),
          said ? "a good journal was refused: " + wrong : "a damaged journal was taken");
  std::uint64_t highest = read.highest();
  if (said) {
    for (const auto& [space, generation] : *said)
      require(read.of(space.data()) == generation, "a namespace has another generation than the journal says");
  } else {
    require(highest <= disk::kMaxGeneration, "a generation out of range was taken");
    const std::uint64_t seen = in.byte(), sequence = in.number() >> 2;
    if (!found_a_number(read, path, [&] { read.restart(seen, sequence); })) return;
    highest = std::max(highest, seen) + 1;
    for (const Space& space : {Space{}, Space{1}, Space{2}, Space{9}})
      require(read.of(space.data()) >= highest, "a restart left something valid");
  }
  const Space one{1};
  const std::uint64_t before = read.of(one.data());
  const bool written = found_a_number(read, path, [&] { read.advance(one.data()); });
  require(read.of(one.data()) > before, "a generation did not rise");
  if (!written) return;
  disk::Generations again(dir.path(), kStore, kJournal);
  const std::string after = again.load();
  require(after.empty(), "what was written cannot be read: " + after);
  for (const Space& space : {Space{}, Space{1}, Space{2}, Space{9}})
    require(again.of(space.data()) == read.of(space.data()), "a restart forgets a generation");
}

std::vector<Input> journal_seeds() {
  const std::uint8_t second = 16;  // 4096 = 0x1000: the other copy
  return {
      {},
      {0, 0, 1, 0, 70, 0},                                                    // a bit of the second entry
      {0, 0, 2, 0, 70, 0, 0, 70, second},                                     // and of its copy
      {255, 255, 1, 2, 64 + 24, 0, 9, 0, 0, 0, 0, 0, 0, 0},                   // another generation, mended
      {2, 0, 1, 2, 64 + 24, 0, 255, 255, 255, 255, 255, 255, 255, 255},       // one out of range
      {2, 2,  2,      2,   72,  0,   255, 255, 255, 255, 255, 255, 255, 255,  // numbers out of range, in both copies
       2, 72, second, 255, 255, 255, 255, 255, 255, 255, 255},                //
      {0, 0, 2, 4, 64, 0, 64, 4, 64, second, 64},                             // a hole
      {0, 0, 1, 3, 64, 0, 128, 0, 64, 0},                                     // an entry twice
      {0, 0, 1, 197, 100, 0},                                                 // cut
      {0, 0, 1, 197, 100, 0, 9, 255, 255, 255, 255, 255, 255, 255, 255}};     // and begun again at the last number
}

void fuzz_store(Reader& in) {
  static const test::TempDir dir;
  static DiskOptions options = [] {
    DiskOptions made;
    made.dir = dir.path();
    made.slots = kSlots;
    made.payload_bytes = 4096;
    made.label_bytes = kLabel;
    made.journal_entries = kJournal;
    return made;
  }();
  const std::string table_path = dir.path() + "/table", journal_path = dir.path() + "/generations";
  struct Files {
    Bytes table, journal;
    disk::StoreId id;
  };
  static const Files valid = [&] {
    {
      const auto store = DiskStore::open(options);
      const Space one{1};
      for (Slot slot = 0; slot < 3; ++slot)
        store->write_record(slot, Named(static_cast<std::uint8_t>(slot), 0, 2).get(), slot + 1);
      store->invalidate(one.data());
      store->invalidate(nullptr);
      for (Slot slot = 3; slot < 5; ++slot)
        store->write_record(slot, Named(static_cast<std::uint8_t>(slot), 2, 2).get(), slot + 1);
    }
    Files made{read_file(table_path), read_file(journal_path), {}};
    disk::Header header;
    std::memcpy(&header, made.table.data(), sizeof header);
    made.id = header.id;
    return made;
  }();
  Files found = valid;
  const std::uint8_t mended = in.byte();
  const bool header_mended = in.flag();
  spoil(in, found.table);
  if (found.table.size() >= sizeof(disk::Header)) {
    disk::Header header;
    std::memcpy(&header, found.table.data(), sizeof header);
    if (header_mended) header.checksum = disk::header_checksum(header);
    std::memcpy(found.table.data(), &header, sizeof header);
    found.id = header.id;
  }
  for (Slot slot = 0; slot < kSlots; ++slot)
    if ((mended >> slot & 1) != 0) mend_record(found.table, disk::kBlock + slot * kRecord, slot, found.id);
  const std::uint16_t entries_mended = in.half();
  spoil(in, found.journal);
  for (std::uint32_t i = 0; i < 2 * kJournal; ++i)
    if ((entries_mended >> i & 1) != 0) mend_entry(found.journal, i / kJournal, i % kJournal, found.id);
  write_file(table_path, found.table);
  write_file(journal_path, found.journal);
  if (in.byte() == 1) std::filesystem::resize_file(dir.path() + "/slab", in.half());

  std::unique_ptr<DiskStore> store;
  try {
    store = DiskStore::open(options);
  } catch (const std::invalid_argument& refused) {
    require(std::string(refused.what()).find('\n') == std::string::npos, "a refusal has more than one line");
    require(read_file(table_path) == found.table, "a store that was refused was changed");
    return;
  } catch (const std::system_error& failed) {
    require(failed.code().value() == EOVERFLOW, std::string("a store cannot be opened: ") + failed.what());
    return;
  }
  const auto inventory = store->scan();
  require(inventory.slots.size() == store->adopted(), "the inventory is not what was adopted");
  std::set<Slot> slots;
  for (std::size_t i = 0; i < inventory.slots.size(); ++i) {
    const Slot slot = inventory.slots[i];
    require(slot < kSlots && slots.insert(slot).second, "a slot out of range, or one named twice");
    alignas(8) std::uint8_t bytes[identity_bytes(kLabel)];
    std::memcpy(bytes, inventory.identities.data() + i * sizeof bytes, sizeof bytes);
    const auto* identity = reinterpret_cast<const PageIdentity*>(bytes);
    require(store->checksum_for(slot, identity) != 0, "an adopted page has no checksum");
    require(identity->generation == store->generation(identity->space), "an invalid page was adopted");
  }
  const Named fresh(77, store->generation(Named(0, 0, 5).get()->space), 5);
  require(store->clear_record(5) == 0 && store->write_record(5, fresh.get(), 99) == 0, "the store cannot be used");
  require(store->checksum_for(5, fresh.get()) == 99, "a record that was written is not there");
  const std::size_t pages = store->scan().slots.size();
  store.reset();
  store = DiskStore::open(options);
  const bool settled = store->notes().empty() || store->notes().find("one of its two copies") != std::string::npos;
  require(settled, "what was mended is broken again: " + store->notes());
  require(store->scan().slots.size() == pages, "another opening found other pages");
}

std::vector<Input> store_seeds() {
  const std::uint8_t record = 16;  // 4096 = 0x1000: the first record begins at byte {0, 16}
  return {{},
          {0, 0, 1, 0, 8, 0},                                                   // the header's version
          {0, 1, 1, 2, 32, 0, 9, 0, 0, 0, 0, 0, 0, 0},                          // the number of slots, mended
          {0, 0, 1, 0, 40, record},                                             // a bit of a record
          {1, 0, 1, 2, 32 + 96, record, 255, 255, 255, 255, 255, 255, 255, 9},  // a generation, mended
          {1, 0, 1, 2, 16, record, 255, 255, 255, 255, 255, 255, 255, 255},     // what it knows of the journal, mended
          {1, 0, 1, 2, 16, record, 0, 0, 0, 0, 0, 0, 0, 64},     // the last number of the journal, mended
          {8, 0, 1, 2, 24, record + 3, 0, 0, 0, 0, 0, 0, 0, 0},  // a page checksum of 0, mended
          {0, 0, 1, 197, 80, record},                            // a table cut
          {0, 0, 1, 197, 220, record, 0, 0, 1, 197, 100, 0},     // in a record's zeros, and a journal
          {0, 0, 0, 0, 0, 1, 0, 70, 0},                          // a bit of the journal
          {0, 0, 0, 0, 0, 2, 4, 64, 0, 200, 4, 64, 16, 200},     // its end is missing
          {0, 0, 0, 0, 0, 0, 1, 0, 40}};                         // a slab cut
}

}  // namespace kvtier::fuzz
