#include "counts.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "builder.h"

namespace softcuda {
namespace ptx {

namespace {

constexpr const char* kCategoryNames[] = {"integer", "float", "special", "convert", "compare",
                                          "move",    "load",  "store",   "copy",    "atomic",
                                          "warp",    "mma",   "barrier", "fence",   "control"};
static_assert(std::size(kCategoryNames) == static_cast<size_t>(Category::count_), "one name each");

struct Named {
  const char* base;
  Category category;
};
// Opcodes whose class does not depend on their types. All other instructions are arithmetic: their
// class is `float` or `integer`, depending on the type.
constexpr Named kBases[] = {
    {"ex2", Category::special},       {"lg2", Category::special},
    {"sin", Category::special},       {"cos", Category::special},
    {"tanh", Category::special},      {"rcp", Category::special},
    {"rsqrt", Category::special},     {"sqrt", Category::special},
    {"cvt", Category::convert},       {"setp", Category::compare},
    {"set", Category::compare},       {"testp", Category::compare},
    {"mov", Category::move},          {"selp", Category::move},
    {"slct", Category::move},         {"cvta", Category::move},
    {"isspacep", Category::move},     {"ld", Category::load},
    {"ldu", Category::load},          {"ldmatrix", Category::load},
    {"st", Category::store},          {"stmatrix", Category::store},
    {"cp", Category::copy},           {"atom", Category::atomic},
    {"red", Category::atomic},        {"shfl", Category::warp},
    {"vote", Category::warp},         {"match", Category::warp},
    {"redux", Category::warp},        {"activemask", Category::warp},
    {"elect", Category::warp},        {"movmatrix", Category::warp},
    {"mma", Category::mma},           {"bar", Category::barrier},
    {"barrier", Category::barrier},   {"mbarrier", Category::barrier},
    {"fence", Category::fence},       {"membar", Category::fence},
    {"bra", Category::control},       {"brx", Category::control},
    {"call", Category::control},      {"ret", Category::control},
    {"exit", Category::control},      {"trap", Category::control},
    {"nanosleep", Category::control}, {"griddepcontrol", Category::control},
};

bool is_float(Type type) {
  switch (type) {
    case Type::f16:
    case Type::f16x2:
    case Type::bf16:
    case Type::bf16x2:
    case Type::f32:
    case Type::f64:
      return true;
    default:
      return false;
  }
}

// The counts of the launch whose blocks the calling thread runs.
thread_local LaunchCounts* t_running = nullptr;

// Appends `"name": {"a": 1, ...}` with the values that are not 0.
template <class Values, class Names>
void add_object(std::string* line, const char* name, const Values& values, const Names& names) {
  *line += std::string(", \"") + name + "\": {";
  const char* separator = "";
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) continue;
    *line += std::string(separator) + "\"" + names[i] + "\": " + std::to_string(values[i]);
    separator = ", ";
  }
  *line += "}";
}

void add_number(std::string* line, const char* name, uint64_t value) {
  *line += std::string(", \"") + name + "\": " + std::to_string(value);
}

void add_triple(std::string* line, const char* name, const softcuda_dim3& value) {
  *line += std::string(", \"") + name + "\": [" + std::to_string(value.x) + ", " +
           std::to_string(value.y) + ", " + std::to_string(value.z) + "]";
}

}  // namespace

Category category_of(const std::string& opcode) {
  Opcode op(opcode, 0);
  if (op.base == "wmma") {
    return op.has("load") ? Category::load : op.has("store") ? Category::store : Category::mma;
  }
  if (op.base == "bar" && op.has("warp")) return Category::warp;
  // ld.param counts as a move: on a GPU, parameters are in constant memory, from which most
  // instructions read operands directly.
  if (op.base == "ld" && op.has("param")) return Category::move;
  for (const Named& known : kBases) {
    if (op.base == known.base) return known.category;
  }
  return is_float(op.take_type()) ? Category::floating : Category::integer;
}

const Instr* count_instruction(Warp& w, const Instr* in) {
  const Kernel& k = *w.block->kernel;
  LaunchCounts& counts = *w.block->counts;
  const uint64_t host_loads = counts.host_loads();
  const Instr* next = k.counted[static_cast<size_t>(in - k.code.data())].run(w, in);
  // A warp-synchronous operation that has to wait for lanes is counted when it runs again.
  if (w.why != Stop::warp_sync) counts.note_instruction(w, in, host_loads);
  return next;
}

// ---- blocks -------------------------------------------------------------------------------------

void LaunchCounts::begin_blocks(const softcuda_ptx_work& work, uint64_t first) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [&] { return next_block_ >= first; });
  if (grid_.x == 0) find_parameters(work);
  grid_ = work.grid;
  block_ = work.block;
  t_running = this;
}

void LaunchCounts::find_parameters(const softcuda_ptx_work& work) {
  for (size_t i = 0; i < kernel_.param_sizes.size(); ++i) {
    if (kernel_.param_sizes[i] != 8) continue;
    uint64_t value = 0;
    std::memcpy(&value, work.parameters + kernel_.param_offsets[i], sizeof value);
    softcuda_memory found{};
    if (device().find_memory(value, 1, &found) == 0) continue;
    parameters_[static_cast<unsigned>(i)] = found.address;
    device().release(found.reference);
  }
}

std::map<unsigned, uint64_t> LaunchCounts::loaded_by_parameter() const {
  std::map<unsigned, uint64_t> bytes;
  for (const auto& parameter : parameters_) {
    const auto loaded = loaded_from_.find(parameter.second);
    if (loaded != loaded_from_.end()) bytes[parameter.first] = loaded->second;
  }
  return bytes;
}

void LaunchCounts::end_blocks(uint64_t next) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    next_block_ = std::max(next_block_, next);
  }
  t_running = nullptr;
  turn_.notify_all();
}

void abandon_counts() {
  if (t_running != nullptr) t_running->end_blocks(~uint64_t{0});
}

void LaunchCounts::begin_block(const Block& b) {
  chains_.assign(b.warps.size(), Chain());
  for (Chain& chain : chains_) chain.depth.assign(kernel_.register_bytes / 4, 0);
  block_instructions_ = block_loaded_ = 0;
}

void LaunchCounts::end_block() {
  ++blocks_;
  longest_instructions_ = std::max(longest_instructions_, block_instructions_);
  longest_loaded_ = std::max(longest_loaded_, block_loaded_);
}

// ---- instructions and accesses ------------------------------------------------------------------

void LaunchCounts::note_instruction(const Warp& w, const Instr* in, uint64_t host_loads) {
  const CountedInstr& counted = kernel_.counted[static_cast<size_t>(in - kernel_.code.data())];
  ++instructions_[static_cast<size_t>(counted.category)];
  ++block_instructions_;

  Chain& chain = chains_[w.index];
  uint32_t depth = 0;
  for (const int32_t offset : counted.reads) {
    depth = std::max(depth, chain.depth[static_cast<size_t>(offset)]);
  }
  switch (counted.category) {
    case Category::load:
    case Category::copy:
    case Category::atomic:
      depth = std::max(depth, chain.base);
      if (host_loads_ != host_loads) {
        // A loop that polls loads the same address again and again, depending on time. Such loads
        // count once.
        auto& last = chain.last[in->site];
        if (last.first != host_address_) last = {host_address_, depth + 1};
        depth = last.second;
        host_chain_ = std::max(host_chain_, depth);
      }
      chain.loaded = std::max(chain.loaded, depth);
      if ((in->aux & kAcquire) != 0) chain.base = std::max(chain.base, depth);
      if (counted.category == Category::copy) chain.stored = std::max(chain.stored, depth);
      break;
    case Category::store:
      chain.stored = std::max(chain.stored, depth);
      break;
    case Category::fence:
      chain.base = std::max(chain.base, chain.loaded);
      break;
    case Category::control:
      chain.base = std::max(chain.base, depth);
      break;
    default:
      break;
  }
  for (const int32_t offset : counted.writes) {
    uint32_t& written = chain.depth[static_cast<size_t>(offset)];
    written = w.mask == w.live() ? depth : std::max(written, depth);
  }
}

void LaunchCounts::join_at_barrier(const Block& b, unsigned barrier) {
  const auto for_waiting = [&](const auto& visit) {
    for (const Warp& w : b.warps) {
      for (unsigned g = 0; g < w.group_count; ++g) {
        const Group& group = w.groups[g];
        if (group.state == Group::at_barrier && group.barrier == barrier) visit(chains_[w.index]);
      }
    }
  };
  uint32_t depth = 0;
  for_waiting([&](const Chain& chain) { depth = std::max({depth, chain.base, chain.stored}); });
  for_waiting([&](Chain& chain) { chain.base = depth; });
}

// Counts the bytes of an access. Returns whether it is an atomic operation.
bool LaunchCounts::add_bytes(const Instr* in, Part part, unsigned bytes, bool write) {
  const size_t index = static_cast<size_t>(in - kernel_.code.data());
  const bool is_atomic = kernel_.counted[index].category == Category::atomic;
  if (is_atomic) {
    ++atomics_;
  } else {
    (write ? stored_ : loaded_)[part] += bytes;
  }
  return is_atomic;
}

void LaunchCounts::note_window(const Instr* in, Space space, unsigned bytes, bool write) {
  add_bytes(in, space == Space::shared ? shared : local, bytes, write);
}

void LaunchCounts::note_global(const Instr* in, const Site& site, const char* storage,
                               unsigned bytes, bool write) {
  const bool is_atomic = add_bytes(in, site.host ? host : global, bytes, write);
  if (site.host && (!write || is_atomic)) {
    ++host_loads_;
    host_address_ = storage;
  }
  if (is_atomic) return;
  if (!write) {
    block_loaded_ += bytes;
    loaded_from_[site.from] += bytes;
  }
  touch(storage, bytes, write, site.host);
}

void LaunchCounts::touch(const char* storage, unsigned bytes, bool write, bool is_host) {
  for (auto at = reinterpret_cast<uint64_t>(storage), end = at + bytes; at < end;) {
    if (at / 4096 != last_page_) {
      last_page_ = at / 4096;
      last_ = &pages_[last_page_];
      last_->host = is_host;
    }
    const uint64_t in_word = at % 64, n = std::min(end - at, 64 - in_word);
    const uint64_t bits = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
    auto& words = write ? last_->stored : last_->loaded;
    words[at / 64 % 64] |= bits << in_word;
    at += n;
  }
}

LaunchCounts::Bytes LaunchCounts::distinct(bool stored) const {
  Bytes bytes{};
  for (const auto& item : pages_) {
    const Page& page = item.second;
    for (const uint64_t word : stored ? page.stored : page.loaded) {
      bytes[page.host ? host : global] += static_cast<unsigned>(__builtin_popcountll(word));
    }
  }
  return bytes;
}

void LaunchCounts::write(const std::string& path) const {
  if (blocks_ == 0 || blocks_ != uint64_t{grid_.x} * grid_.y * grid_.z) return;
  constexpr const char* kParts[] = {"global", "host", "shared", "local"};
  std::string line = "{\"kernel\": \"" + kernel_.name + "\"";
  add_triple(&line, "grid", grid_);
  add_triple(&line, "block", block_);
  add_number(&line, "blocks", blocks_);
  add_object(&line, "instructions", instructions_, kCategoryNames);
  add_object(&line, "loaded", loaded_, kParts);
  add_object(&line, "stored", stored_, kParts);
  add_object(&line, "distinct_loaded", distinct(false), kParts);
  add_object(&line, "distinct_stored", distinct(true), kParts);
  std::vector<uint64_t> by_parameter;
  std::vector<std::string> numbers;
  for (const auto& item : loaded_by_parameter()) {
    numbers.push_back(std::to_string(item.first));
    by_parameter.push_back(item.second);
  }
  add_object(&line, "loaded_by_parameter", by_parameter, numbers);
  add_number(&line, "atomics", atomics_);
  add_number(&line, "longest_block_instructions", longest_instructions_);
  add_number(&line, "longest_block_loaded", longest_loaded_);
  add_number(&line, "dependent_host_loads", host_chain_);
  line += "}\n";
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) {
    std::fprintf(stderr, "softcuda: cannot write to %s\n", path.c_str());
    return;
  }
  std::fwrite(line.data(), 1, line.size(), file);
  std::fclose(file);
}

}  // namespace ptx
}  // namespace softcuda
