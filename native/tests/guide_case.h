// Stress test of the guide worker (guide/worker.h), which fills the token bitmasks of structured
// output. It exercises the worker's threads, its time budgets and its tests of draft candidates.
//
// One thread plays the host and publishes requests. Another thread plays the device: in each replay
// it accepts random tokens, drafts random tokens and offers random candidates to the worker. A
// grammar is a hash function that decides which tokens are allowed.
//
// The test checks that every ready mask row contains exactly the tokens that the grammar allows. It
// also checks that two threads never use a matcher at the same time. The results of whole rounds
// are not checked here: tests/grammar compares them with tests/simulators/reference_round.py.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "guide/worker.h"
#include "softcuda/tests/check.h"

namespace stress {

namespace guided = graft::guide;

constexpr int kVocab = 70, kStop = 0, kMaxDrafts = 4, kMaxCandidates = 3, kGuidedSlots = 6;
constexpr int kBranch = 2;
using Path = std::vector<uint32_t>;  // states that the grammar went through; the last is current

inline uint32_t mix(uint32_t a, uint32_t b) {
  uint32_t hash = (a ^ (b + 0x9e3779b9u + (a << 6) + (a >> 2))) * 0x85ebca6bu;
  return hash ^ (hash >> 13);
}

// Returns whether the grammar allows a token. In a third of the states only one token is allowed;
// the first few states do not allow the stop token.
inline bool may_follow(const Path& path, int32_t token) {
  const uint32_t state = path.back();
  if (token < 0 || token >= kVocab) return false;
  if (state % 3 == 1) return token == static_cast<int32_t>(1 + state % (kVocab - 1));
  if (token == kStop) return path.size() > 3 && state % 7 == 0;
  return token == 1 + static_cast<int32_t>(state % (kVocab - 1)) ||
         mix(state, 77u + token) % 5 == 0;
}

inline Path extended(Path path, int32_t token) {
  path.push_back(mix(path.back(), static_cast<uint32_t>(token)));
  return path;
}

// A matcher whose grammar is a hash function. If `slow` is set, it randomly wastes CPU time, so
// that slots exceed their time budget. The matcher aborts the test if two threads use it at the
// same time, if it receives a token id outside the vocabulary, or if it must fill a mask after the
// stop token.
class HashMatcher final : public guided::NativeMatcher {
 public:
  HashMatcher(uint32_t seed, bool slow) : path_{seed}, random_(seed), slow_(slow) {}

  guided::Outcome accept(int32_t token, guided::ErrorText*) noexcept override {
    const SingleUse use(&in_use_);
    WANT(token >= 0 && token < kVocab);
    pause(40);
    if (stopped_ || !may_follow(path_, token)) return guided::Outcome::kNo;
    stopped_ = token == kStop;
    path_ = extended(std::move(path_), token);
    return guided::Outcome::kYes;
  }
  guided::Filled fill(int32_t* row, int64_t words, int32_t, guided::ErrorText*) noexcept override {
    const SingleUse use(&in_use_);
    WANT(!stopped_ && words == (kVocab + 31) / 32);
    pause(10);
    for (int64_t w = 0; w < words; ++w) row[w] = 0;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (may_follow(path_, token)) row[token / 32] |= static_cast<int32_t>(1u << (token % 32));
    }
    return guided::Filled::kMask;
  }
  guided::Outcome rollback(int32_t tokens, guided::ErrorText*) noexcept override {
    const SingleUse use(&in_use_);
    WANT(tokens > 0 && static_cast<size_t>(tokens) < path_.size());
    path_.resize(path_.size() - static_cast<size_t>(tokens));
    stopped_ = false;
    return guided::Outcome::kYes;
  }
  guided::Outcome is_terminated(guided::ErrorText*) noexcept override {
    return stopped_ ? guided::Outcome::kYes : guided::Outcome::kNo;
  }

 private:
  struct SingleUse {
    explicit SingleUse(std::atomic<bool>* in_use) : in_use_(in_use) {
      WANT(!in_use_->exchange(true));
    }
    ~SingleUse() { in_use_->store(false); }
    std::atomic<bool>* const in_use_;
  };

  void pause(unsigned one_in) {
    if (!slow_ || random_() % one_in != 0) return;
    const int64_t end = graft::clock_ns(CLOCK_THREAD_CPUTIME_ID) + random_() % 400 * 1000;
    while (graft::clock_ns(CLOCK_THREAD_CPUTIME_ID) < end) {
    }
  }

  Path path_;
  std::minstd_rand random_;
  bool slow_, stopped_ = false;
  std::atomic<bool> in_use_{false};
};

inline guided::Budget make_budget(int64_t ns) {
  guided::Budget budget;
  budget.ns = ns;
  return budget;
}

// Returns the object with which the worker finds forced tokens: if the grammar allows only one
// continuation of the text, the worker drafts it without a model. Here, every token has a text of
// one byte, and all texts differ. A draft is therefore forced exactly where the grammar allows only
// one token.
inline std::shared_ptr<const guided::Forced> forced_text() {
  std::string bytes(kVocab, ' ');
  std::iota(bytes.begin(), bytes.end(), ' ');
  return std::make_shared<guided::Forced>(std::vector<uint32_t>(kVocab, 1), bytes, false);
}

// A request in a slot: its position, its grammar state and its drafts. The device thread uses this
// object in replays. The host thread uses it only while no replay refers to the slot.
struct SlotRequest {
  SlotRequest(uint32_t seed, int number, bool slow)
      : epoch(number),
        start(static_cast<int32_t>(seed % 50)),
        n(start),
        limit(start + 2 + static_cast<int32_t>(seed % 40)),
        path{seed},
        matcher(seed, slow) {}

  const int32_t epoch, start;
  int32_t n, limit;
  Path path;
  std::vector<int32_t> drafts;
  std::vector<int32_t> parents;  // for each draft, the row of its parent
  std::vector<Path> paths;       // for each row of a growing tree, the grammar states up to it
  bool active = true;
  HashMatcher matcher;
  std::atomic<bool> over{false};
};

struct GuidedSetting {
  int drafts, threads, candidates;
  int64_t budget_ns;
  bool masked, forced, tree, at_once;

  bool lattice() const { return at_once && candidates > 0; }
  bool grows_tree() const { return tree && candidates > 0 && !at_once; }
  int mode() const {
    if (candidates == 0) return masked ? DRAFT_MODE_CHAIN_FILL : DRAFT_MODE_CHAIN;
    if (at_once) return tree ? DRAFT_MODE_TREE_LATTICE : DRAFT_MODE_CHAIN_LATTICE;
    return tree ? DRAFT_MODE_TREE_PROBE : DRAFT_MODE_CHAIN_PROBE;
  }
};

class GuidedCase {
 public:
  GuidedCase(uint32_t seed, const GuidedSetting& setting)
      : random_(seed),
        setting_(setting),
        memory_(kGuidedSlots * 6 * kSectionWords),
        exchange_{memory_.data(), make_layout(setting), kVocab},
        worker_(exchange_, kMaxInFlight + 2, setting.threads, make_budget(setting.budget_ns),
                setting.forced ? forced_text() : nullptr, setting.forced && !setting.masked) {}

  // Runs the host thread: puts requests into free slots until all of them have ended.
  void run(int requests) {
    std::thread device([this] { run_device(); });
    std::thread reader([this] { read(); });
    int started = 0, ended = 0;
    int64_t replay = 0, retired = 0;
    while (ended < requests) {
      for (int s = 0; s < kGuidedSlots; ++s) {
        auto& request = slots_[s];
        if (request != nullptr && request->over.load() && last_published_[s] <= retired &&
            !worker_.busy(s)) {
          request.reset();
          ++ended;
        }
        if (request != nullptr || started == requests) continue;
        const auto seed = static_cast<uint32_t>(random_());
        request = std::make_unique<SlotRequest>(seed, ++started, setting_.budget_ns > 0);
        if (seed % 2 == 0) request->matcher.timing = timing_;
      }
      ++replay;
      std::vector<guided::Request> batch;
      auto& plan = plans_[replay % (kMaxInFlight + 2)];
      for (int s = 0; s < kGuidedSlots; ++s) {
        plan[s] = slots_[s] != nullptr && !slots_[s]->over.load() ? slots_[s].get() : nullptr;
        if (plan[s] == nullptr) continue;
        batch.push_back({s, plan[s]->epoch, plan[s]->start, &plan[s]->matcher});
        last_published_[s] = replay;
      }
      WANT(worker_.publish(replay, replay - 1, batch));
      published_.store(replay);
      while (finished_.load() + kMaxInFlight < replay) std::this_thread::yield();
      while (retired < finished_.load()) worker_.retire(++retired);
    }
    last_.store(replay);
    device.join();
    reader.join();
    worker_.wait_idle();
    WANT(count(guided::count::desyncs) == 0 && count(guided::count::errors) == 0);
  }
  long count(int what) const { return static_cast<long>(worker_.counters().of[what].value()); }

 private:
  static constexpr int kMaxInFlight = 2, kSectionWords = 64;

  static ExchangeLayout make_layout(const GuidedSetting& setting) {
    ExchangeLayout layout{};
    layout.slots = kGuidedSlots;
    layout.stride = 5 * kSectionWords;
    layout.rows = setting.drafts + 1;
    layout.words = (kVocab + 31) / 32;
    layout.mode = setting.mode();
    layout.candidates = setting.candidates;
    layout.drafts = kBranch * kMaxDrafts;
    layout.branch = setting.tree && setting.candidates > 0 ? kBranch : 1;
    layout.levels = setting.lattice() ? setting.drafts : 0;
    layout.stamps = 0;
    layout.committed = kSectionWords;
    layout.drafted = 2 * kSectionWords;
    layout.candidate_ids = 3 * kSectionWords;
    layout.answer = 4 * kSectionWords;
    layout.masks = kGuidedSlots * layout.stride;
    return layout;
  }

  using Plan = std::array<SlotRequest*, kGuidedSlots>;

  void read() {
    while (last_.load() < 0) {
      for (const guided::Timeline::Span& span : worker_.timeline().read()) {
        WANT(span.start_ns <= span.end_ns && span.end_ns <= graft::monotonic_ns());
      }
      std::this_thread::yield();
    }
  }

  void step(guided::Step kind, int draft) { graft_guide_step(worker_.record(kind, draft)); }

  void run_device() {
    for (int64_t replay = 1; last_.load() < 0 || replay <= last_.load(); ++replay) {
      while (published_.load() < replay) {
        if (last_.load() >= 0 && replay > last_.load()) return;
        std::this_thread::yield();
      }
      const Plan plan = plans_[replay % (kMaxInFlight + 2)];
      bool advanced[kGuidedSlots] = {};
      step(guided::Step::kOpen, 0);
      for (int s = 0; s < kGuidedSlots; ++s) {
        if (plan[s] != nullptr) advanced[s] = verify(*plan[s], s, static_cast<int32_t>(replay));
      }
      if (exchange_.drafts() > 0) step(guided::Step::kCommit, 0);
      if (setting_.lattice()) probe_lattice(plan, advanced, static_cast<int32_t>(replay));
      for (int j = 1; j <= exchange_.drafts() && !setting_.lattice(); ++j) {
        if (setting_.grows_tree()) {
          draft_tree_level(plan, advanced, j, static_cast<int32_t>(replay));
        } else {
          draft_chain(plan, advanced, j, static_cast<int32_t>(replay));
        }
      }
      for (SlotRequest* request : plan) {
        if (request != nullptr && !request->active) request->over.store(true);
      }
      finished_.store(replay);
    }
  }

  int32_t random_below(int32_t below) { return static_cast<int32_t>(random_device_() % below); }

  // Checks that mask row j of slot s contains the tokens that the grammar allows after `path`, and
  // returns a random one of them. `depth` is the number of drafts before the row. Returns -1 if the
  // row is not ready.
  int32_t legal_token(const SlotRequest& request, int s, int j, int depth, const Path& path) {
    const RowStamp& stamp = *exchange_.stamp(s, j);
    if (stamp.state != ROW_READY || stamp.epoch != request.epoch ||
        stamp.position != request.n + depth) {
      return -1;
    }
    std::vector<int32_t> tokens;
    for (int32_t token = 0; token < 32 * exchange_.layout.words; ++token) {
      const auto word = static_cast<uint32_t>(exchange_.mask(s, j)[token / 32]);
      WANT((word >> (token % 32) & 1u) == may_follow(path, token));
      if (may_follow(path, token)) tokens.push_back(token);
    }
    const bool forced = setting_.forced && tokens.size() == 1;
    WANT(stamp.detail == (forced ? 1 + tokens[0] : 0));
    return tokens[static_cast<size_t>(random_below(static_cast<int32_t>(tokens.size())))];
  }

  // Verifies the drafts of a slot: accepts some of them and one more token, and publishes the
  // accepted tokens in the Committed record. Returns whether the request continues and needs
  // further drafts.
  bool verify(SlotRequest& request, int s, int32_t replay) {
    std::vector<int32_t> tokens;
    int row = 0;
    for (int depth = 0; request.n + depth + 1 < request.limit; ++depth) {
      int32_t token = legal_token(request, s, row, depth, request.path);
      if (token < 0) break;
      int child = row + 1;
      const int drafts = static_cast<int>(request.drafts.size());
      const auto fits = [&](int c) {
        return request.parents[c - 1] == row && may_follow(request.path, request.drafts[c - 1]);
      };
      while (child <= drafts && !(fits(child) && random_below(4) != 0)) ++child;
      if (child <= drafts) token = request.drafts[child - 1];
      tokens.push_back(token);
      request.path = extended(std::move(request.path), token);
      if (child > drafts || token == kStop) break;
      row = child;
    }
    Committed* committed = exchange_.committed(s);
    *committed = {replay, static_cast<int32_t>(tokens.size())};
    std::copy(tokens.begin(), tokens.end(), guided::Exchange::ids(committed));
    if (tokens.empty()) return false;
    *exchange_.drafted(s) = {replay, 0};
    request.n += static_cast<int32_t>(tokens.size());
    request.drafts.clear();
    request.parents.clear();
    request.paths.assign(1, request.path);
    request.active = tokens.back() != kStop && request.n + 1 < request.limit;
    return request.active;
  }

  // Adds draft j to the chain of every slot that has j - 1 drafts.
  void draft_chain(const Plan& plan, const bool* advanced, int j, int32_t replay) {
    const bool probing = exchange_.layout.candidates > 0;
    const auto drafting = [&](int s) {
      if (!advanced[s] || static_cast<int>(plan[s]->drafts.size()) != j - 1) return false;
      return plan[s]->n + j < plan[s]->limit && (j == 1 || plan[s]->drafts.back() != kStop);
    };
    for (int s = 0; probing && s < kGuidedSlots; ++s) {
      if (!drafting(s)) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, j, random_below(kMaxCandidates + 1)};
      for (int i = 0; i < offered->count; ++i) guided::Exchange::ids(offered)[i] = random_token();
    }
    if (probing) step(guided::Step::kDraft, j);
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!drafting(s)) continue;
      SlotRequest& request = *plan[s];
      Path path = request.path;
      for (const int32_t draft : request.drafts) path = extended(std::move(path), draft);
      const Answer& answer = *exchange_.answer(s);
      int32_t token = legal_token(request, s, j - 1, j - 1, path);
      if (probing && answer.replay == replay && answer.draft == j && answer.id >= 0) {
        WANT(may_follow(path, answer.id));
        token = answer.id;
      }
      const bool chained = setting_.forced && !setting_.masked;  // only forced tokens are drafted
      if (chained && exchange_.stamp(s, j - 1)->detail == 0) continue;
      if (token < 0 && setting_.masked) continue;
      if (!setting_.masked && !chained) token = random_token();
      if (token < 0) continue;
      const bool branches = setting_.tree && !setting_.masked && !chained;
      request.drafts.push_back(token);
      request.parents.push_back(branches ? random_below(j) : j - 1);
      publish_drafts(request, s, replay);
    }
    if (!probing && setting_.masked && j < exchange_.drafts()) step(guided::Step::kDraft, j);
  }

  // Publishes the drafts of a slot or, while a tree grows, the nodes of all levels so far that are
  // fed to the drafter.
  void publish_drafts(const SlotRequest& request, int s, int32_t replay) {
    Drafted* drafted = exchange_.drafted(s);
    *drafted = {replay, static_cast<int32_t>(request.drafts.size())};
    int32_t* ids = guided::Exchange::ids(drafted);
    std::copy(request.drafts.begin(), request.drafts.end(), ids);
    std::copy(request.parents.begin(), request.parents.end(), ids + exchange_.layout.drafts);
  }

  // Drafts one level of the trees of all slots. The function offers candidates for the children of
  // the current nodes to the worker, whose answer says which of them the grammar allows. It then
  // selects the nodes of the next level among the allowed children. At the last level, it selects
  // the drafts among the nodes of all levels; the parent of a draft is always selected, too.
  void draft_tree_level(const Plan& plan, const bool* advanced, int level, int32_t replay) {
    const int width = exchange_.layout.candidates;
    const int count = level == 1 ? 1 : kBranch;
    const auto row_of = [&](int f) { return level == 1 ? 0 : (level - 2) * kBranch + f + 1; };
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!advanced[s]) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, level, count};
      int32_t* ids = guided::Exchange::ids(offered);
      for (int i = 0; i < count * width; ++i) ids[i] = random_token();
      for (int f = 0; f < count; ++f) {
        if (plan[s]->paths[row_of(f)].empty()) ids[f * width] = -1;
      }
    }
    step(guided::Step::kDraft, level);
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!advanced[s]) continue;
      SlotRequest& request = *plan[s];
      const Answer& answer = *exchange_.answer(s);
      const bool answered = answer.replay == replay && answer.draft == level;
      const int32_t* ids = guided::Exchange::ids(exchange_.candidates(s));
      const int32_t* legal = guided::Exchange::ids(exchange_.answer(s));
      std::vector<std::pair<int32_t, int32_t>> children;  // row of the parent, and token
      for (int f = 0; f < count && answered; ++f) {
        const int row = row_of(f);
        int found = 0;
        for (int i = 0; i < width && ids[f * width + i] >= 0 && found < kBranch; ++i) {
          const int32_t token = ids[f * width + i];
          const bool may = may_follow(request.paths[row], token);
          WANT((static_cast<uint32_t>(legal[f]) >> i & 1u) == may);
          found += may;
          if (may && token != kStop) children.emplace_back(row, token);
        }
      }
      if (level < exchange_.drafts()) {
        for (int f = 0; f < kBranch; ++f) {
          const int at = random_below(static_cast<int32_t>(children.size()) + 1) - 1;
          request.drafts.push_back(at < 0 ? -1 : children[at].second);
          request.parents.push_back(at < 0 ? 0 : children[at].first);
          request.paths.push_back(
              at < 0 ? Path() : extended(request.paths[children[at].first], children[at].second));
        }
      } else {
        keep_random_nodes(request);
      }
      publish_drafts(request, s, replay);
    }
  }

  // Offers the candidates of all draft levels to the worker at once. The worker's answer contains
  // the drafts. If they are a chain of less than the maximum length, one further draft is added if
  // the mask row at the chain's end allows one.
  void probe_lattice(const Plan& plan, const bool* advanced, int32_t replay) {
    const ExchangeLayout& layout = exchange_.layout;
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!advanced[s]) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, 1 + random_below(exchange_.drafts()), 1 + random_below(layout.levels)};
      int32_t* ids = guided::Exchange::ids(offered);
      for (int i = 0; i < layout.levels * layout.candidates; ++i) {
        ids[i] = random_token();
        const float share = 0.25f / static_cast<float>(1 + random_below(4));
        std::memcpy(ids + layout.levels * layout.candidates + i, &share, sizeof share);
      }
    }
    step(guided::Step::kDraft, 1);
    for (int s = 0; s < kGuidedSlots; ++s) {
      const Answer& answer = *exchange_.answer(s);
      if (!advanced[s] || answer.replay != replay) continue;
      WANT(answer.draft == 0 && answer.id >= 0 && answer.id <= exchange_.candidates(s)->draft);
      SlotRequest& request = *plan[s];
      const int32_t* ids = guided::Exchange::ids(exchange_.answer(s));
      for (int32_t j = 0; j < answer.id; ++j) {
        const int32_t parent = ids[layout.drafts + j];
        WANT(parent >= 0 && parent <= j && (layout.branch > 1 || parent == j));
        WANT(parent == 0 || ids[parent - 1] != kStop);
        WANT(may_follow(request.paths[parent], ids[j]));
        request.drafts.push_back(ids[j]);
        request.parents.push_back(parent);
        request.paths.push_back(extended(request.paths[parent], ids[j]));
      }
      const int last = answer.id;
      const bool open = last < exchange_.drafts() && (last == 0 || ids[last - 1] != kStop);
      const bool chain = open && layout.branch == 1;
      const int32_t token = chain ? legal_token(request, s, last, last, request.paths[last]) : -1;
      if (token >= 0) {
        request.drafts.push_back(token);
        request.parents.push_back(last);
      }
      publish_drafts(request, s, replay);
    }
  }

  void keep_random_nodes(SlotRequest& request) {
    std::vector<int32_t> drafts, parents, row_of(request.drafts.size() + 1, -1);
    row_of[0] = 0;
    for (size_t j = 1; j <= request.drafts.size(); ++j) {
      const int32_t parent = row_of[request.parents[j - 1]];
      const bool full = static_cast<int>(drafts.size()) == exchange_.drafts();
      if (request.drafts[j - 1] < 0 || parent < 0 || full || random_below(3) == 0) continue;
      drafts.push_back(request.drafts[j - 1]);
      parents.push_back(parent);
      row_of[j] = static_cast<int32_t>(drafts.size());
    }
    request.drafts = std::move(drafts);
    request.parents = std::move(parents);
  }

  int32_t random_token() { return random_below(kVocab + 2) - 1; }

  std::minstd_rand random_, random_device_;
  const GuidedSetting setting_;
  const std::shared_ptr<guided::OrderTiming> timing_ = std::make_shared<guided::OrderTiming>();
  std::vector<int32_t> memory_;
  const guided::Exchange exchange_;
  guided::Worker worker_;
  std::array<std::unique_ptr<SlotRequest>, kGuidedSlots> slots_;
  std::array<int64_t, kGuidedSlots> last_published_{};
  std::array<Plan, kMaxInFlight + 2> plans_{};
  std::atomic<int64_t> published_{0}, finished_{0}, last_{-1};
};

// Runs the test with `cases` random settings and 40 requests each, and prints the numbers of mask
// rows that were filled too late, of tests of candidates, and of forced tokens.
inline int guide(unsigned seed, int cases) {
  std::minstd_rand random(seed);
  long late = 0, probes = 0, forced = 0;
  for (int i = 0; i < cases; ++i) {
    const int drafts = static_cast<int>(random() % (kMaxDrafts + 1));
    const int candidates = drafts > 0 && random() % 2 == 0 ? kMaxCandidates : 0;
    const int64_t budget =
        random() % 2 == 0 ? 0 : 20'000 + static_cast<int64_t>(random() % 200'000);
    const int threads = 1 + static_cast<int>(random() % 4);
    const bool masked = candidates > 0 || random() % 2 == 0;
    const bool forces = random() % 2 == 0, tree = random() % 2 == 0, at_once = random() % 2 == 0;
    const GuidedSetting setting{drafts, threads, candidates, budget, masked, forces, tree, at_once};
    GuidedCase one(static_cast<uint32_t>(random()), setting);
    one.run(40);
    late += one.count(guided::count::late_rows);
    probes += one.count(guided::count::probes);
    forced += one.count(guided::count::forced_tokens);
  }
  std::printf("%d requests, %ld late, %ld probes, %ld forced\n", 40 * cases, late, probes, forced);
  return 0;
}

}  // namespace stress
