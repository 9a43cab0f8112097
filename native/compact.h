// The compact codec, chunk by chunk: events placed in weight space, steps by class.
#pragma once

#include <algorithm>
#include <memory>

#include "ans.h"
#include "scan.h"

namespace ww {

constexpr uint32_t head_dense = 1u << 21;
constexpr uint32_t head_exceptions = 1u << 22;
constexpr uint32_t head_reserved = 1u << 23;
constexpr uint32_t head_events = head_dense - 1;

// Finding intervals in a group: with vectors for whole groups, one by one for the tail of a tensor.
template <class K>
struct Places {
    const Weights& weights;
#ifdef WW_NEON
    VectorWeights vectors;
    explicit Places(const Weights& w) : weights(w), vectors(w) {}
#else
    explicit Places(const Weights& w) : weights(w) {}
#endif

    uint32_t before(const typename K::Bits* group, size_t place, size_t n_left) const {
#ifdef WW_NEON
        if constexpr (has_vector_keys<K>)
            if (n_left >= group_size) return weight_before<K>(group, place, vectors);
#endif
        (void)n_left;
        return weight_before_any<K>(group, place, weights);
    }

    Hit find(const typename K::Bits* group, uint32_t slot, size_t n_left) const {
#ifdef WW_NEON
        if constexpr (has_vector_keys<K>)
            if (n_left >= group_size) return find_in_group<K>(group, slot, vectors);
#endif
        (void)n_left;
        return find_in_group_any<K>(group, slot, weights);
    }
};

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

constexpr int exception_words(size_t n_bytes) { return n_bytes == 8 ? 3 : 2; }

// ------------------------------------------------------------------------------------------------- encode

// One chunk on its way to code. Coding is a chain of dependent steps, so several chunks are coded in
// turns by one thread: while one waits for its multiply, the others go on.
template <class K>
class ChunkEncoder {
  public:
    using T = typename K::Bits;

    ChunkEncoder(const Model& model, const Weights& weights) : model_(model), weights_(weights), places_(weights) {
        for (int c = 0; c < n_classes; c++) one_step_[c] = model.steps[c].one_step;
    }

    // Finds what there is to code, in one pass over memory; false when nothing changed.
    bool begin(const T* old, const T* now, size_t n) {
        old_ = old;
        now_ = now;
        n_ = n;
        n_events_ = n_changed_ = n_coded_ = 0;
        std::fill(signs_.begin(), signs_.end(), 0);
        uint32_t total = 0;
        for (size_t first = 0; first < n; first += window_size)
            total = collect(first, std::min(window_size, n - first), total);
        if (n_changed_ == 0) return false;
        writer_.restart(stream_);
        push_steps();
        rate_ = choose_rate(n_events_, total, model_.max_weight_log2);
        table_ = &gap_table(rate_ % 8);
        n_left_ = n_events_;
        writer_.reserve(n_events_ + 8);
        return true;
    }

    size_t n_left() const { return n_left_; }

    // Codes the last event not yet coded, in two stages that a gang runs side by side.
    void push_gap_begin() {
        const Event event = events_[--n_left_];
        const uint32_t previous = n_left_ ? events_[n_left_ - 1].end() : 0;
        gap_ = event.start + writer_.borrow(event.log2_weight) - previous;
    }
    void push_gap_end() {
        const int shift = int(rate_ / 8);
        uint32_t quotient = gap_ >> shift, n_again = 0;
        if (__builtin_expect(quotient >= continue_symbol, 0)) {
            n_again = quotient / continue_symbol;
            quotient %= continue_symbol;
            writer_.reserve(n_left_ + n_again + 8);
        }
        writer_.push_gap(table_->symbols[quotient], gap_ & ((1u << shift) - 1), shift);
        for (; n_again; n_again--) writer_.push_symbol(table_->symbols[continue_symbol]);
    }

    void finish(ChunkCode& out) {
        out.words.clear();
        out.head = uint32_t(n_events_) | rate_ << 24;
        const size_t n_exceptions = exceptions_.size() / exception_words(sizeof(T));
        if (n_exceptions) {
            out.head |= head_exceptions;
            out.words.push_back(uint32_t(n_exceptions));
        }
        out.words.push_back(uint32_t(writer_.state()));
        out.words.push_back(uint32_t(writer_.state() >> 32));
        out.words.insert(out.words.end(), stream_.rend() - ptrdiff_t(writer_.n_words()), stream_.rend());
        out.words.insert(out.words.end(), signs_.begin(), signs_.begin() + ptrdiff_t((n_changed_ + 31) / 32));
        out.words.insert(out.words.end(), exceptions_.rbegin(), exceptions_.rend());
        if (out.words.size() >= (n_ * sizeof(T) + 3) / 4) copy_dense(now_, n_, out);
    }

    size_t n_changed() const { return n_changed_; }

  private:
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
        const uint32_t start = running;
        scan_changes(old_ + first, now_ + first, n, window_.changed);
        running = scan_weights<K>(old_ + first, n, weights_, running, window_);
        const size_t n_blocks = (n + block_size - 1) / block_size;
        for (size_t b = 0; b < n_blocks; b++) window_.changed[b] |= window_.expected[b];
        const uint32_t* stop = list_bits(window_.changed, n_blocks, 0, places_listed_);
        make_room(size_t(stop - places_listed_));
        for (const uint32_t* at = places_listed_; at < stop; at++) collect_element(first, *at, start);
        return running;
    }

    void make_room(size_t n) {
        if (events_.size() < n_events_ + n + 1) events_.resize(2 * n_events_ + window_size + 1);
        if (coded_.size() < n_coded_ + n + 1) coded_.resize(2 * n_coded_ + window_size + 1);
        if (32 * signs_.size() < n_changed_ + n + 1) signs_.resize(n_changed_ / 16 + window_size / 32 + 1, 0);
    }

    // An element that changed, or was expected to. Everything is written whether it counts or not, and
    // counted if it does: which it is is too random to branch on.
    void collect_element(size_t first, size_t place, uint32_t window_start) {
        const T *old = old_ + first, from = old[place], to = now_[first + place];
        const uint32_t number = weights_.class_of_key[K::key(from)];
        const size_t group = place / group_size, n_left = n_ - first - group * group_size;
        const uint32_t start = group ? window_.group_end[group - 1] : window_start;
        const uint32_t before = places_.before(old + group * group_size, place % group_size, n_left);
        const bool changed = from != to;
        events_[n_events_] = {start + before, weights_.log2_weight[number]};
        n_events_ += changed ^ (weights_.expected[number] & 1);
        bool negative;
        const T magnitude = split_step<K>(from, to, negative);
        signs_[n_changed_ / 32] |= uint32_t(negative & changed) << (n_changed_ % 32);
        coded_[n_coded_] = {uint32_t(n_changed_), uint32_t(first + place), number, magnitude};
        n_coded_ += changed & !(one_step_[number] & (magnitude == 0));
        n_changed_ += changed;
    }

    void push_steps() {
        exceptions_.clear();
        writer_.reserve(5 * n_coded_);  // a symbol and four times sixteen raw bits each
        for (size_t i = n_coded_; i-- > 0;) push_step(coded_[i]);
    }

    void push_step(const Step& step) {
        const StepTable& table = model_.steps[step.number];
        uint32_t token = token_of(step.magnitude);
        uint32_t symbol = table.symbol_of_token[token];
        uint64_t raw = step.magnitude & ((uint64_t(1) << raw_bits_of(token)) - 1);
        if (symbol == no_symbol) {
            add_exception(step.ordinal, now_[step.position]);
            symbol = 0;
            token = table.tokens[0];
            raw = 0;
        }
        writer_.push_raw(raw, raw_bits_of(token));
        if (table.n > 1) writer_.push_symbol(table.symbols[symbol]);
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
    const T *old_ = nullptr, *now_ = nullptr;
    size_t n_ = 0, n_changed_ = 0, n_events_ = 0, n_coded_ = 0, n_left_ = 0;
    uint32_t rate_ = 0, gap_ = 0;
    bool one_step_[n_classes];
    const GapTable* table_ = nullptr;
    Window window_;
    uint32_t places_listed_[window_size + 2];
    std::vector<Event> events_;
    std::vector<Step> coded_;
    std::vector<uint32_t> stream_, signs_, exceptions_;
    AnsWriter writer_;
};

// How many chunks one thread codes in turns.
constexpr size_t gang_size = 4;

template <class K>
class CompactEncoder {
  public:
    using T = typename K::Bits;

    explicit CompactEncoder(const Model& model) : weights_(model, K::key_mask) {
        for (size_t g = 0; g < gang_size; g++) gang_.emplace_back(new ChunkEncoder<K>(model, weights_));
    }

    // Codes up to gang_size consecutive chunks; returns the number of changed elements.
    size_t encode(const T* old, const T* now, size_t n, size_t chunk, ChunkCode* out) {
        size_t n_changed = 0, n_busy = 0;
        ChunkEncoder<K>* busy[gang_size];
        ChunkCode* codes[gang_size];
        for (size_t g = 0; g * chunk < n; g++) {
            out[g] = ChunkCode();
            if (!gang_[g]->begin(old + g * chunk, now + g * chunk, std::min(chunk, n - g * chunk))) continue;
            n_changed += gang_[g]->n_changed();
            codes[n_busy] = out + g;
            busy[n_busy++] = gang_[g].get();
        }
        push_gaps(busy, n_busy);
        for (size_t g = 0; g < n_busy; g++) busy[g]->finish(*codes[g]);
        return n_changed;
    }

  private:
    static void push_together(ChunkEncoder<K>** busy, size_t n) {
        for (size_t g = 0; g < n; g++) busy[g]->push_gap_begin();
        for (size_t g = 0; g < n; g++) busy[g]->push_gap_end();
    }

    static void push_gaps(ChunkEncoder<K>** busy, size_t n_busy) {
        size_t together = SIZE_MAX;
        for (size_t g = 0; g < n_busy; g++) together = std::min(together, busy[g]->n_left());
        if (n_busy == gang_size)
            for (size_t e = 0; e < together; e++)
                push_together(busy, gang_size);
        for (size_t g = 0; g < n_busy; g++)
            while (busy[g]->n_left()) push_together(busy + g, 1);
    }

    const Weights weights_;
    std::vector<std::unique_ptr<ChunkEncoder<K>>> gang_;
};

// ------------------------------------------------------------------------------------------------- decode

// A chunk of the payload, as its directory row describes it.
struct ChunkView {
    uint32_t head;
    const uint32_t* words;
    size_t n_words;
};

// One chunk on its way back to changes; decoded in turns with others, like ChunkEncoder.
template <class K>
class ChunkDecoder {
  public:
    using T = typename K::Bits;

    ChunkDecoder(const Model& model, const Weights& weights) : model_(model), weights_(weights), places_(weights) {}

    void begin(const T* old, size_t n, const ChunkView& chunk) {
        old_ = old;
        n_ = n;
        chunk_ = chunk;
        n_left_ = chunk.head & head_events;
        const uint32_t rate = chunk.head >> 24;
        if ((chunk.head & head_reserved) || n_left_ > n || rate > max_rate)
            throw CorruptStream("a chunk's head is out of range");
        if (model_.max_weight_log2 > int(rate / 8) + headroom_log2)
            throw CorruptStream("a chunk's rate is too high for its weights");
        table_ = &gap_table(rate % 8);
        shift_ = int(rate / 8);
        reader_ = AnsReader(chunk.words + has_exceptions(), chunk.words + chunk.n_words);
        end_ = 0;
        n_scanned_ = n_window_ = n_changed_ = 0;
        pop_gap(0);
    }

    // Moves on to the window that holds the next event, or to the end; false when there is none.
    bool reach_event() {
        while (slot_ >= end_) {
            if (n_window_) close_window();
            if (n_scanned_ == n_) return false;
            open_window();
        }
        return true;
    }

    // Taking an event, in four stages that a gang runs side by side.
    void find_group() {
        uint32_t passed;
        while (__builtin_expect((passed = groups_passed(window_.group_end + group_, uint32_t(slot_))) == groups_at_once, 0))
            group_ += groups_at_once;
        group_ += passed;
        base_ = group_ ? window_.group_end[group_ - 1] : start_;
    }
    void find_element() {
        const size_t place = first_ + group_ * group_size;
        hit_ = places_.find(old_ + place, uint32_t(slot_) - base_, n_ - place);
    }
    void flip_element() {
        reader_.give_back(uint32_t(slot_) - base_ - hit_.start, hit_.log2_weight);
        const size_t at = group_ * group_size + hit_.place;
        window_.expected[at / block_size] ^= uint64_t(1) << (at % block_size);
    }
    void pop_gap() { pop_gap(base_ + hit_.start + (1u << hit_.log2_weight)); }

    template <class P>
    void finish(P first, std::vector<P>& positions, std::vector<T>& bits) {
        if (slot_ != no_slot) throw CorruptStream("a position lies past the end of its chunk");
        const size_t tail = has_exceptions() ? exception_tail(chunk_.words[0]) : 0;
        const size_t n_signs = (n_changed_ + 31) / 32;
        if (chunk_.n_words < has_exceptions() + 2 + n_signs + tail)
            throw CorruptStream("stream does not end where it must");
        const uint32_t* exceptions = chunk_.words + chunk_.n_words - tail;
        const uint32_t* signs = exceptions - n_signs;
        pop_steps(signs, first, positions, bits);
        reader_.finish(signs);
        check_signs(signs, n_signs);
        put_exceptions(exceptions, tail, bits.data());
    }

  private:
    static constexpr uint64_t no_slot = UINT64_MAX;

    bool has_exceptions() const { return chunk_.head & head_exceptions; }

    void open_window() {
        first_ = n_scanned_;
        n_window_ = std::min(window_size, n_ - first_);
        start_ = end_;
        end_ = scan_weights<K>(old_ + first_, n_window_, weights_, start_, window_);
        n_scanned_ += n_window_;
        group_ = 0;
    }

    // With all events flipped, what is set in the window is what changed.
    void close_window() {
        if (changed_.size() < n_changed_ + n_window_ + 4) {
            changed_.resize(2 * n_changed_ + window_size + 4);
            from_.resize(changed_.size());
        }
        const uint32_t* stop = list_bits(window_.expected, (n_window_ + block_size - 1) / block_size,
                                         uint32_t(first_), changed_.data() + n_changed_);
        const size_t n_changed = size_t(stop - changed_.data());
        for (size_t i = n_changed_; i < n_changed; i++) from_[i] = old_[changed_[i]];
        n_changed_ = n_changed;
        n_window_ = 0;
    }

    void pop_gap(uint32_t from) {
        if (__builtin_expect(n_left_ == 0, 0)) {
            slot_ = no_slot;
            return;
        }
        n_left_--;
        slot_ = from + reader_.pop_gap(*table_, shift_);
    }

    size_t exception_tail(uint32_t n_exceptions) const {
        if (n_exceptions == 0 || n_exceptions > n_changed_)
            throw CorruptStream("more exceptions than changes");
        return size_t(n_exceptions) * exception_words(sizeof(T));
    }

    template <class P>
    void pop_steps(const uint32_t* signs, P first, std::vector<P>& positions, std::vector<T>& bits) {
        positions.resize(n_changed_);
        bits.resize(n_changed_);
        for (size_t i = 0; i < n_changed_; i++) {
            const StepTable& table = model_.steps[weights_.class_of_key[K::key(from_[i])]];
            const T magnitude = table.one_step ? T(0) : pop_step(table);
            const bool negative = (signs[i / 32] >> (i % 32)) & 1;
            positions[i] = P(first + changed_[i]);
            bits[i] = add_step<K>(from_[i], negative, magnitude);
        }
    }

    T pop_step(const StepTable& table) {
        uint32_t token = table.tokens[0];
        if (table.n > 1) token = table.tokens[reader_.pop_symbol(table)];
        return T(magnitude_of(token, reader_.pop_raw(raw_bits_of(token))));
    }

    void check_signs(const uint32_t* signs, size_t n_words) const {
        const size_t used = n_changed_ % 32;
        if (used && signs[n_words - 1] >> used) throw CorruptStream("sign bits past the last change are not zero");
    }

    void put_exceptions(const uint32_t* words, size_t n_words, T* bits) const {
        constexpr int stride = exception_words(sizeof(T));
        int64_t previous = -1;
        for (size_t at = 0; at < n_words; at += size_t(stride)) {
            uint64_t value = words[at + 1];
            if (stride == 3) value |= uint64_t(words[at + 2]) << 32;
            if (int64_t(words[at]) <= previous || words[at] >= n_changed_ || T(value) != value)
                throw CorruptStream("an exception is out of order or out of range");
            bits[words[at]] = T(value);
            previous = words[at];
        }
    }

    const Model& model_;
    const Weights& weights_;
    const Places<K> places_;
    const T* old_ = nullptr;
    ChunkView chunk_ = {};
    size_t n_ = 0, n_left_ = 0, n_scanned_ = 0, n_changed_ = 0;
    const GapTable* table_ = nullptr;
    int shift_ = 0;
    AnsReader reader_;
    uint64_t slot_ = 0;               // of the next event, in weight space
    uint32_t start_ = 0, end_ = 0;    // of the window, in weight space
    uint32_t base_ = 0;               // of the event's group, in weight space
    Hit hit_ = {};
    size_t first_ = 0, n_window_ = 0, group_ = 0;
    Window window_;
    std::vector<uint32_t> changed_;
    std::vector<T> from_;
};

template <class T, class P>
void decode_dense(const T* old, size_t n, const ChunkView& chunk, P first, std::vector<P>& positions,
                  std::vector<T>& bits) {
    if (chunk.head != head_dense || chunk.n_words != (n * sizeof(T) + 3) / 4)
        throw CorruptStream("a dense chunk has the wrong size");
    const uint8_t* raw = reinterpret_cast<const uint8_t*>(chunk.words);
    for (size_t i = n * sizeof(T); i < chunk.n_words * 4; i++)
        if (raw[i]) throw CorruptStream("a dense chunk's padding is not zero");
    for (size_t i = 0; i < n; i++) {
        T value;
        std::memcpy(&value, raw + i * sizeof(T), sizeof(T));
        if (value == old[i]) continue;
        positions.push_back(P(first + i));
        bits.push_back(value);
    }
}

template <class K>
class CompactDecoder {
  public:
    using T = typename K::Bits;

    explicit CompactDecoder(const Model& model) : weights_(model, K::key_mask) {
        for (size_t g = 0; g < gang_size; g++) gang_.emplace_back(new ChunkDecoder<K>(model, weights_));
    }

    // Decodes up to gang_size consecutive chunks into one list each; throws CorruptStream.
    template <class P>
    void decode(const T* old, size_t n, size_t chunk, const ChunkView* views, P first,
                std::vector<P>* positions, std::vector<T>* bits) {
        size_t n_busy = 0, number[gang_size];
        ChunkDecoder<K>* busy[gang_size];
        for (size_t g = 0; g * chunk < n; g++) {
            const size_t count = std::min(chunk, n - g * chunk);
            if (views[g].n_words == 0) {
                if (views[g].head) throw CorruptStream("an empty chunk has a head");
            } else if (views[g].head & head_dense) {
                decode_dense(old + g * chunk, count, views[g], P(first + g * chunk), positions[g], bits[g]);
            } else {
                gang_[g]->begin(old + g * chunk, count, views[g]);
                number[n_busy] = g;
                busy[n_busy++] = gang_[g].get();
            }
        }
        take_events(busy, n_busy);
        for (size_t b = 0; b < n_busy; b++)
            busy[b]->finish(P(first + number[b] * chunk), positions[number[b]], bits[number[b]]);
    }

  private:
    static void take_together(ChunkDecoder<K>** busy, size_t n) {
        for (size_t g = 0; g < n; g++) busy[g]->find_group();
        for (size_t g = 0; g < n; g++) busy[g]->find_element();
        for (size_t g = 0; g < n; g++) busy[g]->flip_element();
        for (size_t g = 0; g < n; g++) busy[g]->pop_gap();
    }

    static bool all_reach_event(ChunkDecoder<K>** busy) {
        for (size_t g = 0; g < gang_size; g++)
            if (!busy[g]->reach_event()) return false;
        return true;
    }

    static void take_events(ChunkDecoder<K>** busy, size_t n_busy) {
        if (n_busy == gang_size)
            while (all_reach_event(busy)) take_together(busy, gang_size);
        for (size_t g = 0; g < n_busy; g++)
            while (busy[g]->reach_event()) take_together(busy + g, 1);
    }

    const Weights weights_;
    std::vector<std::unique_ptr<ChunkDecoder<K>>> gang_;
};

}  // namespace ww
