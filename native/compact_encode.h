// The compact encoder, chunk by chunk: events placed in weight space, steps by class.
#pragma once

#include "compact.h"

namespace ww {

struct ChunkCode {
    uint32_t head = 0;
    std::vector<uint32_t> words;
};

template <class T>
void copy_dense(const T* now, size_t n, ChunkCode& out) {
    out.head = head_dense;
    out.words.assign((n * sizeof(T) + 3) / 4, 0);
    std::memcpy(out.words.data(), now, n * sizeof(T));
}

// One chunk on its way to code: collect everything forwards, then push it backwards.
template <class K>
class ChunkEncoder {
  public:
    using T = typename K::Bits;

    ChunkEncoder(const Model& model, const Weights& weights) : model_(model), weights_(weights), places_(weights) {}

    // Finds what there is to code, in one pass over memory; false when nothing changed. With `keep`, lists
    // the changes as well.
    bool begin(const T* old, const T* now, size_t n, bool keep = false) {
        old_ = old;
        now_ = now;
        n_ = n;
        keep_ = keep;
        n_events_ = n_changed_ = n_coded_ = 0;
        events_.make_room(0, 1);
        events_[0] = {UINT32_MAX, 0};
        uint32_t total = 0;
        for (size_t first = 0; first < n; first += window_size)
            total = collect(first, std::min(window_size, n - first), total);
        if (n_changed_ == 0) return false;
        rate_ = choose_rate(n_events_, total, model_.max_weight_log2);
        table_ = &gap_table(rate_ % 8);
        n_gaps_left_ = n_events_;
        n_steps_left_ = n_coded_;
        exceptions_.clear();
        writer_.restart();
        writer_.reserve(max_step_words * n_coded_ + n_events_ + spare_words);
        return true;
    }

    size_t n_changed() const { return n_changed_; }

    // The changes that `begin` listed, at positions counted from `first` elements before the chunk.
    void give_changes(uint32_t first, std::vector<uint32_t>& positions, std::vector<T>& bits) const {
        positions.resize(n_changed_);
        for (size_t i = 0; i < n_changed_; i++) positions[i] = first + kept_positions_.data()[i];
        bits.assign(kept_bits_.data(), kept_bits_.data() + n_changed_);
    }

    size_t n_steps_left() const { return n_steps_left_; }
    size_t n_gaps_left() const { return n_gaps_left_; }

    // Codes the last magnitude not yet coded.
    void push_step() {
        const Step& step = coded_[--n_steps_left_];
        const StepTable& table = model_.steps[step.number];
        uint32_t token = token_of(step.magnitude);
        uint32_t symbol = table.symbol_of_token[token];
        uint64_t raw = step.magnitude & ((uint64_t(1) << raw_bits_of(token)) - 1);
        if (__builtin_expect(symbol == no_symbol, 0)) {
            add_exception(step.ordinal, now_[step.position]);
            symbol = 0;
            token = table.tokens[0];
            raw = 0;
        }
        writer_.push_raw(raw, raw_bits_of(token));
        if (table.n > 1) writer_.push_symbol(table.symbols[symbol]);
    }

    // Codes the last event not yet coded, in two stages that a gang runs side by side.
    void push_gap_begin() {
        const Event event = events_[n_gaps_left_--];
        gap_ = event.start + writer_.borrow(event.log2_weight) - events_[n_gaps_left_].end();
    }
    void push_gap_end() {
        const uint32_t shift = rate_ / 8;
        uint32_t quotient = gap_ >> shift, n_again = 0;
        if (__builtin_expect(quotient >= continue_symbol, 0)) {
            n_again = quotient / continue_symbol;
            quotient %= continue_symbol;
            writer_.reserve(n_gaps_left_ + n_again + spare_words);
        }
        writer_.push_gap(table_->symbols[quotient], gap_ & ((1u << shift) - 1), shift);
        for (; n_again; n_again--) writer_.push_gap(table_->symbols[continue_symbol], 0, 0);
    }

    void finish(ChunkCode& out) {
        const size_t n_exceptions = exceptions_.size() / exception_words(sizeof(T));
        const size_t n_signs = (n_changed_ + 31) / 32;
        out.head = uint32_t(n_events_) | rate_ << 24;
        out.words.clear();
        out.words.reserve(3 + writer_.n_words() + n_signs + exceptions_.size());
        if (n_exceptions) {
            out.head |= head_exceptions;
            out.words.push_back(uint32_t(n_exceptions));
        }
        out.words.push_back(uint32_t(writer_.state()));
        out.words.push_back(uint32_t(writer_.state() >> 32));
        std::reverse_copy(writer_.words(), writer_.words() + writer_.n_words(), std::back_inserter(out.words));
        add_signs(n_signs, out.words);
        out.words.insert(out.words.end(), exceptions_.rbegin(), exceptions_.rend());
        if (out.words.size() >= (n_ * sizeof(T) + 3) / 4) copy_dense(now_, n_, out);
    }

  private:
    static constexpr size_t max_step_words = 5;  // a symbol, and four times sixteen raw bits
    static constexpr size_t spare_words = 8;

    struct Event {
        uint32_t start;  // where the element's interval begins in weight space
        uint32_t log2_weight;
        uint32_t end() const { return start + (1u << log2_weight); }
    };

    // A change whose class leaves its magnitude open.
    struct Step {
        uint32_t ordinal, position;
        uint32_t number;  // of its class
        T magnitude;
    };

    uint32_t collect(size_t first, size_t n, uint32_t running) {
        running = scan_window<K, true>(old_ + first, now_ + first, n, weights_, running, window_);
        const uint32_t* stop = list_bits(window_.marked, (n + block_size - 1) / block_size, 0, listed_);
        const size_t n_listed = size_t(stop - listed_);
        events_.make_room(n_events_ + 1, n_events_ + n_listed + 2);
        coded_.make_room(n_coded_, n_coded_ + n_listed + 1);
        negative_.make_room(n_changed_, n_changed_ + n_listed + 33);
        if (keep_) {
            kept_positions_.make_room(n_changed_, n_changed_ + n_listed + 1);
            kept_bits_.make_room(n_changed_, n_changed_ + n_listed + 1);
            collect_listed<true>(first, stop);
        } else {
            collect_listed<false>(first, stop);
        }
        return running;
    }

    // Elements that changed, or were expected to. Everything is written whether it counts or not, and
    // counted if it does: which it is is too random to branch on.
    template <bool Keep>
    void collect_listed(size_t first, const uint32_t* stop) {
        const T *old = old_ + first, *now = now_ + first;
        const size_t n_whole = (n_ - first) / group_size;
        Event* event = &events_[n_events_ + 1];
        Step* step = &coded_[n_coded_];
        uint8_t* negatives = negative_.data();
        uint32_t* kept_positions = kept_positions_.data();
        T* kept_bits = kept_bits_.data();
        size_t n_changed = n_changed_;
        for (const uint32_t* at = listed_; at < stop; at++) {
            const size_t place = *at, group = place / group_size;
            const T from = old[place], to = now[place];
            const KeyInfo info = weights_.of_key[K::key(from)];
            const bool changed = from != to;
            bool negative;
            const T magnitude = split_step<K>(from, to, negative);
            *event = {window_.start_of_group(group) +
                          places_.before(old + group * group_size, place % group_size, group < n_whole),
                      info.log2_weight};
            event += changed ^ info.expected;
            negatives[n_changed] = negative;
            if constexpr (Keep) {
                kept_positions[n_changed] = uint32_t(first + place);
                kept_bits[n_changed] = to;
            }
            *step = {uint32_t(n_changed), uint32_t(first + place), info.number, magnitude};
            step += changed & !(info.one_step & (magnitude == 0));
            n_changed += changed;
        }
        n_events_ = size_t(event - &events_[1]);
        n_coded_ = size_t(step - &coded_[0]);
        n_changed_ = n_changed;
    }

    // One bit per change, eight of them by one multiply; the last word first, so that a reader finds the
    // first one at a place that does not depend on how many there are.
    void add_signs(size_t n_words, std::vector<uint32_t>& words) {
        std::memset(negative_.data() + n_changed_, 0, 32);
        for (size_t w = n_words; w-- > 0;) {
            uint32_t word = 0;
            for (size_t b = 0; b < 4; b++) {
                uint64_t bytes;
                std::memcpy(&bytes, negative_.data() + 32 * w + 8 * b, 8);
                word |= uint32_t((bytes * 0x0102040810204080ull) >> 56) << (8 * b);
            }
            words.push_back(word);
        }
    }

    // Met backwards, so each exception's words are backwards too.
    void add_exception(uint32_t ordinal, T bits) {
        if constexpr (sizeof(T) == 8) exceptions_.push_back(uint32_t(uint64_t(bits) >> 32));
        exceptions_.push_back(uint32_t(bits));
        exceptions_.push_back(ordinal);
    }

    const Model& model_;
    const Weights& weights_;
    const Places<K> places_;
    AnsWriter writer_;
    Buffer<Event> events_;  // the first one is a stand-in that ends at 0
    size_t n_gaps_left_ = 0, n_steps_left_ = 0;
    uint32_t rate_ = 0, gap_ = 0;
    const GapTable* table_ = nullptr;
    const T *old_ = nullptr, *now_ = nullptr;
    size_t n_ = 0, n_changed_ = 0, n_events_ = 0, n_coded_ = 0;
    Buffer<Step> coded_;
    Buffer<uint8_t> negative_;
    bool keep_ = false;
    Buffer<uint32_t> kept_positions_;  // within the chunk
    Buffer<T> kept_bits_;
    std::vector<uint32_t> exceptions_;
    Window window_;
    uint32_t listed_[window_size + 2];
};

template <class K>
class CompactEncoder {
  public:
    using T = typename K::Bits;
    using Member = ChunkEncoder<K>;

    explicit CompactEncoder(const Model& model) : weights_(model, K::key_mask) {
        for (size_t g = 0; g < gang_size; g++) gang_.emplace_back(new Member(model, weights_));
    }

    // Codes up to gang_size consecutive chunks; returns the number of changed elements. Unless `positions`
    // is null, every chunk's changes are given too, counted from `first` elements before the gang.
    size_t encode(const T* old, const T* now, size_t n, size_t chunk, ChunkCode* out, uint32_t first = 0,
                  std::vector<uint32_t>* positions = nullptr, std::vector<T>* bits = nullptr) {
        size_t n_changed = 0, n_busy = 0;
        Member* busy[gang_size];
        ChunkCode* codes[gang_size];
        for (size_t g = 0; g * chunk < n; g++) {
            out[g] = ChunkCode();
            const size_t start = g * chunk;
            if (!gang_[g]->begin(old + start, now + start, std::min(chunk, n - start), positions)) continue;
            if (positions) gang_[g]->give_changes(first + uint32_t(start), positions[g], bits[g]);
            n_changed += gang_[g]->n_changed();
            codes[n_busy] = out + g;
            busy[n_busy++] = gang_[g].get();
        }
        work_in_turns(busy, n_busy, [](Member& m) { return m.n_steps_left() > 0; }, push_steps);
        work_in_turns(busy, n_busy, [](Member& m) { return m.n_gaps_left() > 0; }, push_gaps);
        for (size_t g = 0; g < n_busy; g++) busy[g]->finish(*codes[g]);
        return n_changed;
    }

  private:
    static void push_steps(Member** gang, size_t n) {
        for (size_t g = 0; g < n; g++) gang[g]->push_step();
    }
    static void push_gaps(Member** gang, size_t n) {
        for (size_t g = 0; g < n; g++) gang[g]->push_gap_begin();
        for (size_t g = 0; g < n; g++) gang[g]->push_gap_end();
    }

    const Weights weights_;
    std::vector<std::unique_ptr<Member>> gang_;
};

}  // namespace ww
