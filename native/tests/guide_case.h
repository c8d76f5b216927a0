// The guided worker's threads, budgets and probes between a host that publishes and a device that
// accepts, drafts and offers at random, over grammars that are hash functions.
//
// What a round must come to is for tests/grammar to say, over tests/reference_round.py. Here every
// row that is ready must be the grammar's own at its place, and one thread at a time in a matcher.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver_calls.h"
#include "guide/worker.h"

namespace stress {

namespace guided = graft::guide;

constexpr int kVocab = 70, kStop = 0, kMostDrafts = 4, kMostCandidates = 3, kGuidedSlots = 6;
constexpr int kBranch = 2;
using Path = std::vector<uint32_t>;  // a state, and those before it

inline uint32_t blend(uint32_t a, uint32_t b) {
  uint32_t hash = (a ^ (b + 0x9e3779b9u + (a << 6) + (a >> 2))) * 0x85ebca6bu;
  return hash ^ (hash >> 13);
}

// Which tokens may follow: in a third of the states one alone; the first few states cannot end.
inline bool may_follow(const Path& path, int32_t token) {
  const uint32_t state = path.back();
  if (token < 0 || token >= kVocab) return false;
  if (state % 3 == 1) return token == static_cast<int32_t>(1 + state % (kVocab - 1));
  if (token == kStop) return path.size() > 3 && state % 7 == 0;
  return token == 1 + static_cast<int32_t>(state % (kVocab - 1)) ||
         blend(state, 77u + token) % 5 == 0;
}

inline Path followed(Path path, int32_t token) {
  path.push_back(blend(path.back(), static_cast<uint32_t>(token)));
  return path;
}

// Keeps its whole path, and dawdles when told to: that makes slots late. Wants of its caller what
// the contract of matchers says: one thread at a time, known ids only, no mask after the end.
class HashMatcher final : public guided::NativeMatcher {
 public:
  HashMatcher(uint32_t seed, bool dawdles) : path_{seed}, random_(seed), dawdles_(dawdles) {}

  guided::Answer accept(int32_t token, guided::ErrorText*) noexcept override {
    const Alone alone(&inside_);
    WANT(token >= 0 && token < kVocab);
    pause(40);
    if (stopped_ || !may_follow(path_, token)) return guided::Answer::kNo;
    stopped_ = token == kStop;
    path_ = followed(std::move(path_), token);
    return guided::Answer::kYes;
  }
  guided::Filled fill(int32_t* row, int64_t words, guided::ErrorText*) noexcept override {
    const Alone alone(&inside_);
    WANT(!stopped_ && words == (kVocab + 31) / 32);
    pause(10);
    for (int64_t w = 0; w < words; ++w) row[w] = 0;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (may_follow(path_, token)) row[token / 32] |= static_cast<int32_t>(1u << (token % 32));
    }
    return guided::Filled::kMask;
  }
  guided::Answer rollback(int32_t tokens, guided::ErrorText*) noexcept override {
    const Alone alone(&inside_);
    WANT(tokens > 0 && static_cast<size_t>(tokens) < path_.size());
    path_.resize(path_.size() - static_cast<size_t>(tokens));
    stopped_ = false;
    return guided::Answer::kYes;
  }
  guided::Answer is_terminated(guided::ErrorText*) noexcept override {
    return stopped_ ? guided::Answer::kYes : guided::Answer::kNo;
  }

 private:
  struct Alone {
    explicit Alone(std::atomic<bool>* inside) : inside_(inside) { WANT(!inside_->exchange(true)); }
    ~Alone() { inside_->store(false); }
    std::atomic<bool>* const inside_;
  };

  void pause(unsigned one_in) {
    if (!dawdles_ || random_() % one_in != 0) return;
    const int64_t end = graft::clock_ns(CLOCK_THREAD_CPUTIME_ID) + random_() % 400 * 1000;
    while (graft::clock_ns(CLOCK_THREAD_CPUTIME_ID) < end) {
    }
  }

  Path path_;
  std::minstd_rand random_;
  bool dawdles_, stopped_ = false;
  std::atomic<bool> inside_{false};
};

// Every token has a text of its own, so that text is forced where one token is legal.
inline std::shared_ptr<const guided::Forced> forced_text() {
  std::string bytes(kVocab, ' ');
  std::iota(bytes.begin(), bytes.end(), ' ');
  return std::make_shared<guided::Forced>(std::vector<uint32_t>(kVocab, 1), bytes, false);
}

// One request's stay in a slot, as the device sees it.
struct Stay {
  Stay(uint32_t seed, int number, bool dawdles)
      : epoch(number),
        start(static_cast<int32_t>(seed % 50)),
        n(start),
        limit(start + 2 + static_cast<int32_t>(seed % 40)),
        path{seed},
        matcher(seed, dawdles) {}

  const int32_t epoch, start;
  int32_t n, limit;
  Path path;
  std::vector<int32_t> drafts;
  std::vector<int32_t> parents;  // of the drafts, row numbers
  std::vector<Path> paths;       // of the rows, while a tree grows
  bool active = true;
  HashMatcher matcher;
  std::atomic<bool> over{false};
};

struct GuidedSetting {
  int drafts, threads, candidates;
  int64_t budget_ns;
  bool masked, forced, tree, at_once;

  bool walks() const { return at_once && candidates > 0; }
  bool grows() const { return tree && candidates > 0 && !at_once; }
};

class GuidedCase {
 public:
  GuidedCase(uint32_t seed, const GuidedSetting& setting)
      : random_(seed),
        setting_(setting),
        memory_(kGuidedSlots * 6 * kPart),
        exchange_{
            memory_.data(),
            {kGuidedSlots, 5 * kPart, setting.drafts + 1, (kVocab + 31) / 32, setting.candidates,
             kBranch * kMostDrafts, setting.tree && setting.candidates > 0 ? kBranch : 1,
             setting.walks() ? setting.drafts : 0, 0, kPart, 2 * kPart, 3 * kPart, 4 * kPart,
             kGuidedSlots * 5 * kPart},
            kVocab},
        worker_(exchange_, kAhead + 2, setting.threads, {setting.budget_ns, nullptr},
                setting.forced ? forced_text() : nullptr, setting.forced && !setting.masked) {}

  // Runs requests one after another in every slot until all have ended.
  void run(int requests) {
    std::thread device([this] { run_device(); });
    std::thread reader([this] { read(); });
    int started = 0, ended = 0;
    int64_t replay = 0, retired = 0;
    while (ended < requests) {
      for (int s = 0; s < kGuidedSlots; ++s) {
        auto& stay = seated_[s];
        if (stay != nullptr && stay->over.load() && last_named_[s] <= retired && !worker_.busy(s)) {
          stay.reset();
          ++ended;
        }
        if (stay != nullptr || started == requests) continue;
        const auto seed = static_cast<uint32_t>(random_());
        stay = std::make_unique<Stay>(seed, ++started, setting_.budget_ns > 0);
        if (seed % 2 == 0) stay->matcher.pace = pace_;
      }
      ++replay;
      std::vector<guided::Request> named;
      auto& plan = plans_[replay % (kAhead + 2)];
      for (int s = 0; s < kGuidedSlots; ++s) {
        plan[s] = seated_[s] != nullptr && !seated_[s]->over.load() ? seated_[s].get() : nullptr;
        if (plan[s] == nullptr) continue;
        named.push_back({s, plan[s]->epoch, plan[s]->start, &plan[s]->matcher});
        last_named_[s] = replay;
      }
      WANT(worker_.publish(replay, named));
      published_.store(replay);
      while (finished_.load() + kAhead < replay) std::this_thread::yield();
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
  static constexpr int kAhead = 2, kPart = 64;
  using Plan = std::array<Stay*, kGuidedSlots>;

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
      const Plan plan = plans_[replay % (kAhead + 2)];
      bool moved[kGuidedSlots] = {};
      step(guided::Step::kOpen, 0);
      for (int s = 0; s < kGuidedSlots; ++s) {
        if (plan[s] != nullptr) moved[s] = verify(*plan[s], s, static_cast<int32_t>(replay));
      }
      if (exchange_.drafts() > 0) step(guided::Step::kCommit, 0);
      if (setting_.walks()) walk(plan, moved, static_cast<int32_t>(replay));
      for (int j = 1; j <= exchange_.drafts() && !setting_.walks(); ++j) {
        if (setting_.grows()) {
          grow(plan, moved, j, static_cast<int32_t>(replay));
        } else {
          draw(plan, moved, j, static_cast<int32_t>(replay));
        }
      }
      for (Stay* stay : plan) {
        if (stay != nullptr && !stay->active) stay->over.store(true);
      }
      finished_.store(replay);
    }
  }

  int32_t any(int32_t below) { return static_cast<int32_t>(random_device_() % below); }

  // A token that row j, at a depth, allows after `path`, if the row is ready; -1: it is not.
  int32_t legal(const Stay& stay, int s, int j, int depth, const Path& path) {
    const RowStamp& stamp = *exchange_.stamp(s, j);
    if (stamp.state != ROW_READY || stamp.epoch != stay.epoch || stamp.position != stay.n + depth) {
      return -1;
    }
    std::vector<int32_t> tokens;
    for (int32_t token = 0; token < 32 * exchange_.layout.words; ++token) {
      const auto word = static_cast<uint32_t>(exchange_.mask(s, j)[token / 32]);
      WANT((word >> (token % 32) & 1u) == may_follow(path, token));
      if (may_follow(path, token)) tokens.push_back(token);
    }
    const bool forced = setting_.forced && tokens.size() == 1;
    WANT(stamp.more == (forced ? 1 + tokens[0] : 0));
    return tokens[static_cast<size_t>(any(static_cast<int32_t>(tokens.size())))];
  }

  // Accepts some of the drafts, and a token behind them. Returns whether drafting goes on.
  bool verify(Stay& stay, int s, int32_t replay) {
    std::vector<int32_t> tokens;
    int row = 0;
    for (int depth = 0; stay.n + depth + 1 < stay.limit; ++depth) {
      int32_t token = legal(stay, s, row, depth, stay.path);
      if (token < 0) break;
      int child = row + 1;
      const int drafts = static_cast<int>(stay.drafts.size());
      const auto fits = [&](int c) {
        return stay.parents[c - 1] == row && may_follow(stay.path, stay.drafts[c - 1]);
      };
      while (child <= drafts && !(fits(child) && any(4) != 0)) ++child;
      if (child <= drafts) token = stay.drafts[child - 1];
      tokens.push_back(token);
      stay.path = followed(std::move(stay.path), token);
      if (child > drafts || token == kStop) break;
      row = child;
    }
    Committed* committed = exchange_.committed(s);
    *committed = {replay, static_cast<int32_t>(tokens.size())};
    std::copy(tokens.begin(), tokens.end(), guided::Exchange::ids(committed));
    if (tokens.empty()) return false;
    *exchange_.drafted(s) = {replay, 0};
    stay.n += static_cast<int32_t>(tokens.size());
    stay.drafts.clear();
    stay.parents.clear();
    stay.paths.assign(1, stay.path);
    stay.active = tokens.back() != kStop && stay.n + 1 < stay.limit;
    return stay.active;
  }

  // Draft j of every slot that has those before it.
  void draw(const Plan& plan, const bool* moved, int j, int32_t replay) {
    const bool probing = exchange_.layout.candidates > 0;
    const auto drafting = [&](int s) {
      if (!moved[s] || static_cast<int>(plan[s]->drafts.size()) != j - 1) return false;
      return plan[s]->n + j < plan[s]->limit && (j == 1 || plan[s]->drafts.back() != kStop);
    };
    for (int s = 0; probing && s < kGuidedSlots; ++s) {
      if (!drafting(s)) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, j, any(kMostCandidates + 1)};
      for (int i = 0; i < offered->count; ++i) guided::Exchange::ids(offered)[i] = rubbish();
    }
    if (probing) step(guided::Step::kDraft, j);
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!drafting(s)) continue;
      Stay& stay = *plan[s];
      Path path = stay.path;
      for (const int32_t draft : stay.drafts) path = followed(std::move(path), draft);
      const Answer& answer = *exchange_.answer(s);
      int32_t token = legal(stay, s, j - 1, j - 1, path);
      if (probing && answer.replay == replay && answer.draft == j && answer.id >= 0) {
        WANT(may_follow(path, answer.id));
        token = answer.id;
      }
      const bool chained = setting_.forced && !setting_.masked;  // forced tokens alone are drafted
      if (chained && exchange_.stamp(s, j - 1)->more == 0) continue;
      if (token < 0 && setting_.masked) continue;
      if (!setting_.masked && !chained) token = rubbish();
      if (token < 0) continue;
      const bool branches = setting_.tree && !setting_.masked && !chained;
      stay.drafts.push_back(token);
      stay.parents.push_back(branches ? any(j) : j - 1);
      tell(stay, s, replay);
    }
    if (!probing && setting_.masked && j < exchange_.drafts()) step(guided::Step::kDraft, j);
  }

  // The drafts of a slot, or while a tree grows what is fed.
  void tell(const Stay& stay, int s, int32_t replay) {
    Drafted* drafted = exchange_.drafted(s);
    *drafted = {replay, static_cast<int32_t>(stay.drafts.size())};
    int32_t* ids = guided::Exchange::ids(drafted);
    std::copy(stay.drafts.begin(), stay.drafts.end(), ids);
    std::copy(stay.parents.begin(), stay.parents.end(), ids + exchange_.layout.drafts);
  }

  // A level of trees: asks for the legal children of what is fed, and feeds some of them; at the
  // last level some of the nodes that were fed, with their parents, become the drafts.
  void grow(const Plan& plan, const bool* moved, int level, int32_t replay) {
    const int most = exchange_.layout.candidates;
    const int count = level == 1 ? 1 : kBranch;
    const auto row_of = [&](int f) { return level == 1 ? 0 : (level - 2) * kBranch + f + 1; };
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!moved[s]) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, level, count};
      int32_t* ids = guided::Exchange::ids(offered);
      for (int i = 0; i < count * most; ++i) ids[i] = rubbish();
      for (int f = 0; f < count; ++f) {
        if (plan[s]->paths[row_of(f)].empty()) ids[f * most] = -1;
      }
    }
    step(guided::Step::kDraft, level);
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!moved[s]) continue;
      Stay& stay = *plan[s];
      const Answer& answer = *exchange_.answer(s);
      const bool answered = answer.replay == replay && answer.draft == level;
      const int32_t* ids = guided::Exchange::ids(exchange_.candidates(s));
      const int32_t* legal = guided::Exchange::ids(exchange_.answer(s));
      std::vector<std::pair<int32_t, int32_t>> children;  // parent's row and token
      for (int f = 0; f < count && answered; ++f) {
        const int row = row_of(f);
        int found = 0;
        for (int i = 0; i < most && ids[f * most + i] >= 0 && found < kBranch; ++i) {
          const int32_t token = ids[f * most + i];
          const bool may = may_follow(stay.paths[row], token);
          WANT((static_cast<uint32_t>(legal[f]) >> i & 1u) == may);
          found += may;
          if (may && token != kStop) children.emplace_back(row, token);
        }
      }
      if (level < exchange_.drafts()) {
        for (int f = 0; f < kBranch; ++f) {
          const int at = any(static_cast<int32_t>(children.size()) + 1) - 1;
          stay.drafts.push_back(at < 0 ? -1 : children[at].second);
          stay.parents.push_back(at < 0 ? 0 : children[at].first);
          stay.paths.push_back(
              at < 0 ? Path() : followed(stay.paths[children[at].first], children[at].second));
        }
      } else {
        keep_some(stay);
      }
      tell(stay, s, replay);
    }
  }

  // Offers candidates of all levels at once. The answer is the drafts; behind a chain that ended
  // early its row may bring one more.
  void walk(const Plan& plan, const bool* moved, int32_t replay) {
    const ExchangeLayout& layout = exchange_.layout;
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!moved[s]) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {replay, 1 + any(exchange_.drafts()), 1 + any(layout.levels)};
      int32_t* ids = guided::Exchange::ids(offered);
      for (int i = 0; i < layout.levels * layout.candidates; ++i) {
        ids[i] = rubbish();
        const float share = 0.25f / static_cast<float>(1 + any(4));
        std::memcpy(ids + layout.levels * layout.candidates + i, &share, sizeof share);
      }
    }
    step(guided::Step::kDraft, 1);
    for (int s = 0; s < kGuidedSlots; ++s) {
      const Answer& answer = *exchange_.answer(s);
      if (!moved[s] || answer.replay != replay) continue;
      WANT(answer.draft == 0 && answer.id >= 0 && answer.id <= exchange_.candidates(s)->draft);
      Stay& stay = *plan[s];
      const int32_t* ids = guided::Exchange::ids(exchange_.answer(s));
      for (int32_t j = 0; j < answer.id; ++j) {
        const int32_t parent = ids[layout.drafts + j];
        WANT(parent >= 0 && parent <= j && (layout.branch > 1 || parent == j));
        WANT(parent == 0 || ids[parent - 1] != kStop);
        WANT(may_follow(stay.paths[parent], ids[j]));
        stay.drafts.push_back(ids[j]);
        stay.parents.push_back(parent);
        stay.paths.push_back(followed(stay.paths[parent], ids[j]));
      }
      const int last = answer.id;
      const bool open = last < exchange_.drafts() && (last == 0 || ids[last - 1] != kStop);
      const bool chain = open && layout.branch == 1;
      const int32_t token = chain ? legal(stay, s, last, last, stay.paths[last]) : -1;
      if (token >= 0) {
        stay.drafts.push_back(token);
        stay.parents.push_back(last);
      }
      tell(stay, s, replay);
    }
  }

  void keep_some(Stay& stay) {
    std::vector<int32_t> drafts, parents, row_of(stay.drafts.size() + 1, -1);
    row_of[0] = 0;
    for (size_t j = 1; j <= stay.drafts.size(); ++j) {
      const int32_t parent = row_of[stay.parents[j - 1]];
      const bool full = static_cast<int>(drafts.size()) == exchange_.drafts();
      if (stay.drafts[j - 1] < 0 || parent < 0 || full || any(3) == 0) continue;
      drafts.push_back(stay.drafts[j - 1]);
      parents.push_back(parent);
      row_of[j] = static_cast<int32_t>(drafts.size());
    }
    stay.drafts = std::move(drafts);
    stay.parents = std::move(parents);
  }

  int32_t rubbish() { return any(kVocab + 2) - 1; }

  std::minstd_rand random_, random_device_;
  const GuidedSetting setting_;
  const std::shared_ptr<guided::Pace> pace_ = std::make_shared<guided::Pace>();
  std::vector<int32_t> memory_;
  const guided::Exchange exchange_;
  guided::Worker worker_;
  std::array<std::unique_ptr<Stay>, kGuidedSlots> seated_;
  std::array<int64_t, kGuidedSlots> last_named_{};
  std::array<Plan, kAhead + 2> plans_{};
  std::atomic<int64_t> published_{0}, finished_{0}, last_{-1};
};

// Random settings, 40 requests each.
inline int guide(unsigned seed, int cases) {
  std::minstd_rand random(seed);
  long late = 0, probes = 0, forced = 0;
  for (int i = 0; i < cases; ++i) {
    const int drafts = static_cast<int>(random() % (kMostDrafts + 1));
    const int candidates = drafts > 0 && random() % 2 == 0 ? kMostCandidates : 0;
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
