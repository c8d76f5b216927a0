// The guided worker with threads, budgets and probes between a host that publishes and a device
// that verifies, over grammars that are hash functions.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver_calls.h"
#include "guide/worker.h"

namespace stress {

namespace guided = graft::guide;

constexpr int kVocab = 70, kStop = 0, kMostDrafts = 4, kMostCandidates = 3, kGuidedSlots = 6;

inline uint32_t blend(uint32_t a, uint32_t b) {
  uint32_t hash = (a ^ (b + 0x9e3779b9u + (a << 6) + (a >> 2))) * 0x85ebca6bu;
  return hash ^ (hash >> 13);
}

// Tokens 2 k and 2 k + 1 begin alike, the second goes on; the stop token has no text.
inline std::string text_of(int32_t token) {
  if (token == kStop) return "";
  const std::string begin(1, static_cast<char>('0' + token / 2));
  return token % 2 == 0 ? begin : begin + "+";
}

// Which tokens may follow a state; the first few states cannot end, so that every text has some.
// In a third of the states the text is forced, in half of those by one token.
inline bool may_follow(uint32_t state, int32_t token, size_t length) {
  if (token < 0 || token >= kVocab) return false;
  if (state % 3 == 1) {
    const auto only = static_cast<int32_t>(2 + blend(state, 5) % (kVocab - 2));
    return token == only || (state % 2 == 0 && token == (only ^ 1));
  }
  if (token == kStop) return length > 2 && state % 7 == 0;
  return token == 1 + static_cast<int32_t>(state % (kVocab - 1)) ||
         blend(state, 77u + token) % 5 == 0;
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
    if (stopped_ || !may_follow(path_.back(), token, path_.size())) return guided::Answer::kNo;
    stopped_ = token == kStop;
    path_.push_back(blend(path_.back(), static_cast<uint32_t>(token)));
    return guided::Answer::kYes;
  }
  guided::Filled fill(int32_t* row, int64_t words, guided::ErrorText*) noexcept override {
    const Alone alone(&inside_);
    WANT(!stopped_ && words == (kVocab + 31) / 32);
    pause(10);
    for (int64_t w = 0; w < words; ++w) row[w] = 0;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (!may_follow(path_.back(), token, path_.size())) continue;
      row[token / 32] |= static_cast<int32_t>(1u << (token % 32));
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
    const int64_t end = guided::clock_ns(CLOCK_THREAD_CPUTIME_ID) + random_() % 400 * 1000;
    while (guided::clock_ns(CLOCK_THREAD_CPUTIME_ID) < end) {
    }
  }

  std::vector<uint32_t> path_;
  std::minstd_rand random_;
  bool dawdles_, stopped_ = false;
  std::atomic<bool> inside_{false};
};

// What the model of a request wants at a position, among the legal tokens.
template <typename Legal>
int32_t favourite(uint32_t seed, int32_t position, const Legal& legal) {
  int32_t best = -1;
  uint32_t best_score = 0;
  for (int32_t token = 0; token < kVocab; ++token) {
    const uint32_t score = blend(blend(seed, static_cast<uint32_t>(position)), 1000u + token);
    if (legal(token) && (best < 0 || score > best_score)) {
      best = token;
      best_score = score;
    }
  }
  return best;
}

inline std::vector<int32_t> sequential(uint32_t seed, int32_t position, int32_t limit) {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> path{seed};
  while (position + 1 < limit && (tokens.empty() || tokens.back() != kStop)) {
    ++position;
    tokens.push_back(favourite(seed, position, [&](int32_t token) {
      return may_follow(path.back(), token, path.size());
    }));
    path.push_back(blend(path.back(), static_cast<uint32_t>(tokens.back())));
  }
  return tokens;
}

// One request's stay in a slot, as the device sees it.
struct Stay {
  uint32_t seed = 0;
  int32_t epoch = 0, start = 0, n = 0, limit = 0;
  bool active = false;
  int drafts = 0;
  int32_t draft[kMostDrafts] = {};
  std::vector<int32_t> tokens;
  std::unique_ptr<HashMatcher> matcher;
  std::atomic<bool> over{false};
};

enum class Forcing { kNone, kAny, kCertain };

struct GuidedSetting {
  int drafts, threads, candidates;
  int64_t budget_ns;
  bool masked;
  Forcing forcing;
};

inline std::shared_ptr<const guided::Forced> forced_text(Forcing forcing) {
  if (forcing == Forcing::kNone) return nullptr;
  std::vector<uint32_t> lengths;
  std::string bytes;
  for (int32_t token = 0; token < kVocab; ++token) {
    lengths.push_back(static_cast<uint32_t>(text_of(token).size()));
    bytes += text_of(token);
  }
  return std::make_shared<guided::Forced>(lengths, bytes, forcing == Forcing::kCertain);
}

// The token that a row forces, as the definition says; -1: none.
inline int32_t forced_by(Forcing forcing, const std::vector<int32_t>& legal) {
  if (forcing == Forcing::kNone || legal.empty()) return -1;
  if (legal.size() == 1) return legal[0];
  if (forcing == Forcing::kCertain) return -1;
  const int32_t longest = *std::max_element(legal.begin(), legal.end(), [](int32_t a, int32_t b) {
    return text_of(a).size() < text_of(b).size();
  });
  for (const int32_t token : legal) {
    const std::string text = text_of(token);
    if (text.empty() || text_of(longest).compare(0, text.size(), text) != 0) return -1;
  }
  return longest;
}

class GuidedCase {
 public:
  GuidedCase(uint32_t seed, const GuidedSetting& setting)
      : random_(seed),
        setting_(setting),
        memory_(kGuidedSlots * 6 * kPart),
        exchange_{memory_.data(),
                  {kGuidedSlots, 6 * kPart, setting.drafts + 1, (kVocab + 31) / 32,
                   setting.candidates, 0, kPart, 2 * kPart, 3 * kPart, 4 * kPart, 5 * kPart},
                  kVocab},
        worker_(exchange_, kAhead + 2, setting.threads, {setting.budget_ns, nullptr},
                forced_text(setting.forcing),
                setting.forcing != Forcing::kNone && !setting.masked) {}

  // Runs requests one after another in every slot; returns how many ended, all of them rightly.
  int run(int requests) {
    std::thread device([this] { run_device(); });
    std::thread reader([this] { read(); });
    int started = 0, ended = 0;
    int64_t replay = 0, retired = 0;
    while (ended < requests) {
      for (int s = 0; s < kGuidedSlots; ++s) {
        auto& stay = seated_[s];
        if (stay != nullptr && stay->over.load() && last_named_[s] <= retired && !worker_.busy(s)) {
          WANT(stay->tokens == sequential(stay->seed, stay->start, stay->limit));
          stay.reset();
          ++ended;
        }
        if (stay == nullptr && started < requests) stay = begin(++started);
      }
      ++replay;
      std::vector<guided::Request> named;
      auto& plan = plans_[replay % (kAhead + 2)];
      for (int s = 0; s < kGuidedSlots; ++s) {
        plan[s] = seated_[s] != nullptr && !seated_[s]->over.load() ? seated_[s].get() : nullptr;
        if (plan[s] == nullptr) continue;
        named.push_back({s, plan[s]->epoch, plan[s]->start, plan[s]->matcher.get()});
        last_named_[s] = replay;
      }
      WANT(worker_.publish(replay, named));
      published_.store(replay);
      while (finished_.load() + kAhead < replay) std::this_thread::yield();
      while (retired < finished_.load()) WANT(worker_.retire(++retired));
    }
    last_.store(replay);
    device.join();
    reader.join();
    worker_.wait_idle();
    const auto count = [&](int what) {
      return static_cast<long>(worker_.counters().of[what].value());
    };
    WANT(count(guided::count::desyncs) == 0 && count(guided::count::errors) == 0);
    late_ = count(guided::count::late_rows);
    probes_ = count(guided::count::probes);
    forced_ = count(guided::count::forced_tokens);
    return ended;
  }
  long late() const { return late_; }
  long probes() const { return probes_; }
  long forced() const { return forced_; }

 private:
  static constexpr int kAhead = 2, kPart = 64;

  std::unique_ptr<Stay> begin(int number) {
    auto stay = std::make_unique<Stay>();
    stay->seed = static_cast<uint32_t>(random_());
    stay->epoch = number;
    stay->start = stay->n = static_cast<int32_t>(random_() % 50);
    stay->limit = stay->start + 2 + static_cast<int32_t>(random_() % 40);
    stay->active = true;
    stay->matcher = std::make_unique<HashMatcher>(stay->seed, setting_.budget_ns > 0);
    if (stay->seed % 2 == 0) stay->matcher->pace = pace_;
    return stay;
  }

  void read() {
    while (last_.load() < 0) {
      WANT(worker_.first_error().empty());
      worker_.timeline().read();
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
      const auto plan = plans_[replay % (kAhead + 2)];
      bool moved[kGuidedSlots] = {};
      step(guided::Step::kOpen, 0);
      for (int s = 0; s < kGuidedSlots; ++s) {
        if (plan[s] != nullptr) moved[s] = verify(*plan[s], s, replay);
      }
      if (exchange_.drafts() > 0) step(guided::Step::kCommit, 0);
      for (int j = 1; j <= exchange_.drafts(); ++j) draw(plan, moved, j, replay);
      for (int s = 0; s < kGuidedSlots; ++s) {
        if (plan[s] != nullptr && !plan[s]->active) plan[s]->over.store(true);
      }
      finished_.store(replay);
    }
  }

  // The row's mask, if it is ready for this stay at this position.
  const int32_t* ready(const Stay& stay, int s, int j) {
    const RowStamp& stamp = *exchange_.stamp(s, j);
    if (stamp.state != guided::kRowReady || stamp.epoch != stay.epoch ||
        stamp.position != stay.n + j) {
      return nullptr;
    }
    const int32_t* mask = exchange_.mask(s, j);
    std::vector<int32_t> legal;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (bit(mask, token)) legal.push_back(token);
    }
    WANT(stamp.more == 1 + forced_by(setting_.forcing, legal));
    return mask;
  }
  static bool bit(const int32_t* mask, int32_t token) {
    return (static_cast<uint32_t>(mask[token / 32]) >> (token % 32) & 1u) != 0;
  }

  bool verify(Stay& stay, int s, int64_t replay) {
    std::vector<int32_t> tokens;
    for (int j = 0; stay.active && j <= stay.drafts && stay.n + j + 1 < stay.limit; ++j) {
      const int32_t* mask = ready(stay, s, j);
      if (mask == nullptr) break;
      tokens.push_back(
          favourite(stay.seed, stay.n + j + 1, [&](int32_t token) { return bit(mask, token); }));
      WANT(tokens.back() >= 0);
      if (tokens.back() == kStop || j == stay.drafts || tokens.back() != stay.draft[j]) break;
    }
    Committed* committed = exchange_.committed(s);
    *committed = {static_cast<int32_t>(replay), static_cast<int32_t>(tokens.size())};
    std::copy(tokens.begin(), tokens.end(), guided::Exchange::ids(committed));
    if (tokens.empty()) return false;
    *exchange_.drafted(s) = {static_cast<int32_t>(replay), 0};
    stay.n += static_cast<int32_t>(tokens.size());
    stay.drafts = 0;
    stay.tokens.insert(stay.tokens.end(), tokens.begin(), tokens.end());
    stay.active = tokens.back() != kStop && stay.n + 1 < stay.limit;
    return stay.active;
  }

  bool worker_chains() const { return setting_.forcing != Forcing::kNone && !setting_.masked; }

  bool drafting(const Stay& stay, int j) const {
    return stay.drafts == j - 1 && stay.n + j < stay.limit &&
           (j == 1 || stay.draft[j - 2] != kStop);
  }

  void draw(const std::array<Stay*, kGuidedSlots>& plan, const bool* moved, int j, int64_t replay) {
    const bool probing = exchange_.layout.candidates > 0;
    for (int s = 0; probing && s < kGuidedSlots; ++s) {
      if (!moved[s] || !drafting(*plan[s], j)) continue;
      Candidates* offered = exchange_.candidates(s);
      *offered = {static_cast<int32_t>(replay), j,
                  static_cast<int32_t>(random_device_() % (kMostCandidates + 1))};
      for (int i = 0; i < offered->count; ++i) {
        guided::Exchange::ids(offered)[i] =
            static_cast<int32_t>(random_device_() % (kVocab + 2)) - 1;
      }
    }
    if (probing) step(guided::Step::kDraft, j);
    for (int s = 0; s < kGuidedSlots; ++s) {
      if (!moved[s] || !drafting(*plan[s], j)) continue;
      Stay& stay = *plan[s];
      int32_t token = -1;
      const Answer& answer = *exchange_.answer(s);
      if (probing && answer.replay == static_cast<int32_t>(replay) && answer.draft == j) {
        token = answer.id;
      }
      const int32_t* mask = ready(stay, s, j - 1);
      const int32_t forced = exchange_.stamp(s, j - 1)->more - 1;
      if (token < 0 && mask != nullptr && forced >= 0) {
        token = forced;
      } else if (token < 0 && worker_chains()) {
        continue;  // forced tokens alone are drafted
      } else if (token < 0 && mask != nullptr) {
        token = favourite(stay.seed, stay.n + j, [&](int32_t t) { return bit(mask, t); });
      } else if (token < 0 && !setting_.masked) {
        token = static_cast<int32_t>(random_device_() % (kVocab + 2)) - 1;
      }
      if (token < 0 && setting_.masked) continue;
      stay.draft[stay.drafts++] = token;
      *exchange_.drafted(s) = {static_cast<int32_t>(replay), j};
      guided::Exchange::ids(exchange_.drafted(s))[j - 1] = token;
    }
    if (!probing && setting_.masked && j < exchange_.drafts()) step(guided::Step::kDraft, j);
  }

  std::minstd_rand random_, random_device_;
  const GuidedSetting setting_;
  const std::shared_ptr<guided::Pace> pace_ = std::make_shared<guided::Pace>();
  std::vector<int32_t> memory_;
  const guided::Exchange exchange_;
  guided::Worker worker_;
  std::array<std::unique_ptr<Stay>, kGuidedSlots> seated_;
  std::array<int64_t, kGuidedSlots> last_named_{};
  std::array<std::array<Stay*, kGuidedSlots>, kAhead + 2> plans_{};
  std::atomic<int64_t> published_{0}, finished_{0}, last_{-1};
  long late_ = 0, probes_ = 0, forced_ = 0;
};

// Trees of drafts, legal and not, in one slot: rows are those of the paths to their nodes, and what
// is committed down one of them stands.
inline int trees(uint32_t seed) {
  std::minstd_rand random(seed);
  const int nodes = 1 + static_cast<int>(random() % 63);
  constexpr int kWords = (kVocab + 31) / 32;
  std::vector<int32_t> mask(static_cast<size_t>((nodes + 1) * kWords));
  const guided::Exchange exchange{
      mask.data(), {1, 0, nodes + 1, kWords, 0, 0, 0, 0, 0, 0, 0}, kVocab};
  const guided::SlotWork work(exchange, nullptr, false);
  HashMatcher matcher(seed, false);
  guided::Slot slot;
  slot.size_for(exchange);
  slot.matcher = &matcher;
  using Path = std::vector<uint32_t>;
  const auto favoured = [&](const Path& path) {
    return favourite(static_cast<uint32_t>(random()), 0,
                     [&](int32_t t) { return may_follow(path.back(), t, path.size()); });
  };
  const auto follow = [](Path path, int32_t token) {
    const bool legal = !path.empty() && may_follow(path.back(), token, path.size());
    if (!legal || token == kStop) return Path();
    path.push_back(blend(path.back(), static_cast<uint32_t>(token)));
    return path;
  };
  const auto want_row = [&](int j, const Path& path) {
    WANT(slot.made[j].load() == (path.empty() ? guided::kRowNotReady : guided::kRowReady));
    for (int32_t t = 0; !path.empty() && t < kWords * 32; ++t) {
      const auto word = static_cast<uint32_t>(mask[j * kWords + t / 32]);
      WANT((word >> (t % 32) & 1u) == may_follow(path.back(), t, path.size()));
    }
  };
  guided::Order& order = slot.order;
  std::vector<Path> paths{{seed}};  // to each node; empty where none leads there, or on
  for (int round = 0;; ++round) {
    paths.resize(1);
    order.drafts = static_cast<int>(random() % (nodes + 1));
    for (int j = 1; j <= order.drafts; ++j) {
      const auto parent = static_cast<int32_t>(random() % j);
      const bool known = !paths[parent].empty() && random() % 4 != 0;
      order.parent[j] = parent;
      order.draft[j - 1] = known ? favoured(paths[parent]) : static_cast<int32_t>(random() % 90);
      paths.push_back(follow(paths[parent], order.draft[j - 1]));
    }
    order.task = guided::Task::kRows;
    work.serve(slot);
    for (int j = 0; j <= order.drafts; ++j) want_row(j, paths[j]);
    WANT(slot.node == 0);
    int node = static_cast<int>(random() % (order.drafts + 1));
    while (paths[node].empty()) node = order.parent[node];
    std::vector<int32_t> tokens;
    for (int up = node; up != 0; up = order.parent[up]) tokens.push_back(order.draft[up - 1]);
    std::reverse(tokens.begin(), tokens.end());
    tokens.push_back(favoured(paths[node]));
    order.commit.given = true;
    order.commit.count = static_cast<int>(tokens.size());
    std::copy(tokens.begin(), tokens.end(), order.commit.tokens.begin());
    order.task = guided::Task::kRow0;
    work.forget_rows(slot);
    work.serve(slot);
    order.commit.given = false;
    WANT(slot.tally[guided::count::errors] == 0);
    WANT(slot.ended == (tokens.back() == kStop));
    if (slot.ended || round == 20) return round;
    paths[0] = follow(paths[node], tokens.back());
    want_row(0, paths[0]);
  }
}

// Random settings until the time is over; every request's tokens are those of a sequential run.
inline int guide(unsigned seed, int cases) {
  std::minstd_rand random(seed);
  long requests = 0, late = 0, probes = 0, forced = 0;
  for (int i = 0; i < cases; ++i) {
    const int drafts = static_cast<int>(random() % (kMostDrafts + 1));
    const int candidates = drafts > 0 && random() % 2 == 0 ? kMostCandidates : 0;
    const int64_t budget =
        random() % 2 == 0 ? 0 : 20'000 + static_cast<int64_t>(random() % 200'000);
    const GuidedSetting setting{
        drafts, 1 + static_cast<int>(random() % 4),  candidates,
        budget, candidates > 0 || random() % 2 == 0, static_cast<Forcing>(random() % 3)};
    GuidedCase one(static_cast<uint32_t>(random()), setting);
    requests += one.run(40);
    late += one.late();
    probes += one.probes();
    forced += one.forced();
    trees(static_cast<uint32_t>(random()));
  }
  std::printf("%ld requests, %ld late, %ld probes, %ld forced\n", requests, late, probes, forced);
  return 0;
}

}  // namespace stress
