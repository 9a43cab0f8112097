// The compact decoder: mirrors compact_encode.h, and trusts nothing it reads.
#pragma once

#include "compact.h"

namespace ww {

// A chunk of the payload, as its directory row describes it.
struct ChunkView {
    uint32_t head;
    const uint32_t* words;
    size_t n_words;
};

// One chunk on its way back to changes.
template <class K>
class ChunkDecoder {
  public:
    using T = typename K::Bits;

    ChunkDecoder(const Model& model, const Weights& weights) : model_(model), weights_(weights), places_(weights) {}

    // Positions are counted from `first`.
    void begin(const T* old, size_t n, const ChunkView& chunk, uint32_t first) {
        old_ = old;
        n_ = n;
        chunk_ = chunk;
        first_position_ = first;
        n_left_ = chunk.head & head_events;
        const uint32_t rate = chunk.head >> 24;
        if ((chunk.head & head_reserved) || n_left_ > n || rate > max_rate)
            throw CorruptStream("a chunk's head is out of range");
        if (model_.max_weight_log2 > int(rate / 8) + headroom_log2)
            throw CorruptStream("a chunk's rate is too high for its weights");
        slots_ = gap_table(rate % 8).slots;
        shift_ = rate / 8;
        reader_ = AnsReader(chunk.words + has_exceptions(), chunk.words + chunk.n_words);
        end_ = 0;
        n_scanned_ = n_window_ = n_changed_ = 0;
        pop_gap(0);
    }

    // Moves on to the window that holds the next event, or to the end; false when there is none.
    bool reach_event() {
        while (__builtin_expect(slot_ >= end_, 0)) {
            if (n_window_) close_window();
            if (n_scanned_ == n_) return false;
            open_window();
        }
        return true;
    }

    // Taking an event, in stages that a gang runs side by side.
    void find_block() {
        uint32_t passed;
        while (__builtin_expect((passed = blocks_passed(window_.border + 1 + block_, uint32_t(slot_))) == blocks_at_once, 0))
            block_ += blocks_at_once;
        block_ += passed;
        in_block_ = uint32_t(slot_) - window_.border[block_];
    }
    void find_group() {
        const uint16_t* ends = window_.ends_of_block(block_);
        const uint32_t passed = groups_passed(ends, in_block_);
        group_ = block_ * groups_per_block + passed;
        in_group_ = in_block_ - ends[ptrdiff_t(passed) - 1];
    }
    void find_element() {
        hit_ = places_.find(window_old_ + group_ * group_size, in_group_, group_ < n_whole_groups_);
    }
    void flip_element() {
        reader_.give_back(hit_.offset, hit_.log2_weight);
        const size_t at = group_ * group_size + hit_.place;
        window_.marked[block_] ^= uint64_t(1) << (at % block_size);
    }
    void pop_gap() { pop_gap(uint32_t(slot_) - hit_.offset + (1u << hit_.log2_weight)); }

    // With all events known: where the signs are, and the new bits of all changes that are one step.
    void begin_steps() {
        if (slot_ != no_slot) throw CorruptStream("a position lies past the end of its chunk");
        n_tail_ = has_exceptions() ? exception_tail(chunk_.words[0]) : 0;
        n_signs_ = (n_changed_ + 31) / 32;
        if (chunk_.n_words < has_exceptions() + 2 + n_signs_ + n_tail_)
            throw CorruptStream("stream does not end where it must");
        signs_ = chunk_.words + chunk_.n_words - n_tail_ - n_signs_;
        list_coded();
        take_one_step();
    }

    size_t n_steps_left() const { return n_coded_ - n_popped_; }

    // The next change whose class leaves its magnitude open.
    void pop_step() {
        const Coded coded = coded_[n_popped_++];
        const StepTable& table = model_.steps[weights_.of_key[K::key(coded.from)].number];
        uint32_t token = table.tokens[0];
        if (table.n > 1) token = table.tokens[reader_.pop_symbol(table)];
        const T magnitude = T(magnitude_of(token, reader_.pop_raw(raw_bits_of(token))));
        bits_[coded.ordinal] = add_step<K>(coded.from, is_negative(coded.ordinal), magnitude);
    }

    void finish() {
        reader_.finish(signs_);
        check_signs();
        put_exceptions(signs_ + n_signs_);
    }

    size_t n_changed() const { return n_changed_; }
    const uint32_t* positions() const { return positions_.data(); }
    const T* bits() const { return bits_.data(); }

  private:
    static constexpr uint64_t no_slot = UINT64_MAX;
    static constexpr size_t signs_at_once = 32;

    struct Coded {
        uint32_t ordinal;
        T from;
    };

    bool has_exceptions() const { return chunk_.head & head_exceptions; }
    // The first sign word is the last before the exceptions: where it stands is known from the start.
    uint32_t sign_word(size_t w) const { return signs_[n_signs_ - 1 - w]; }
    bool is_negative(size_t ordinal) const { return (sign_word(ordinal / 32) >> (ordinal % 32)) & 1; }

    void open_window() {
        window_first_ = n_scanned_;
        window_old_ = old_ + window_first_;
        n_window_ = std::min(window_size, n_ - window_first_);
        n_whole_groups_ = (n_ - window_first_) / group_size;
        end_ = scan_window<K, false>(window_old_, window_old_, n_window_, weights_, end_, window_);
        n_scanned_ += n_window_;
        block_ = 0;
    }

    // With all events flipped, what is marked in the window is what changed.
    void close_window() {
        positions_.make_room(n_changed_, n_changed_ + n_window_ + 2);
        bits_.make_room(n_changed_, n_changed_ + n_window_ + signs_at_once);
        const uint32_t first = first_position_ + uint32_t(window_first_);
        uint32_t* begin = positions_.data() + n_changed_;
        uint32_t* stop = list_bits(window_.marked, (n_window_ + block_size - 1) / block_size, first, begin);
        T* bits = bits_.data() + n_changed_;
        for (const uint32_t* at = begin; at < stop; at++) *bits++ = window_old_[*at - first];
        n_changed_ += size_t(stop - begin);
        n_window_ = 0;
    }

    void pop_gap(uint32_t from) {
        if (__builtin_expect(n_left_ == 0, 0)) {
            slot_ = no_slot;
            return;
        }
        n_left_--;
        slot_ = from + reader_.pop_gap(slots_, shift_);
    }

    size_t exception_tail(uint32_t n_exceptions) const {
        if (n_exceptions == 0 || n_exceptions > n_changed_)
            throw CorruptStream("more exceptions than changes");
        return size_t(n_exceptions) * exception_words(sizeof(T));
    }

    void list_coded() {
        coded_.make_room(0, n_changed_ + 1);
        Coded* coded = coded_.data();
        const T* bits = bits_.data();
        for (size_t i = 0; i < n_changed_; i++) {
            *coded = {uint32_t(i), bits[i]};
            coded += !weights_.of_key[K::key(bits[i])].one_step;
        }
        n_coded_ = size_t(coded - coded_.data());
        n_popped_ = 0;
    }

    // From the old bits to the next ones up or down: most changes are that, and the others are set later.
    void take_one_step() {
        for (size_t w = 0; w < n_signs_; w++) {
            const uint32_t signs = sign_word(w);
            T* bits = bits_.data() + w * signs_at_once;
            for (size_t i = 0; i < signs_at_once; i++) bits[i] = add_step<K>(bits[i], (signs >> i) & 1, T(0));
        }
    }

    void check_signs() const {
        const size_t used = n_changed_ % 32;
        if (used && signs_[0] >> used) throw CorruptStream("sign bits past the last change are not zero");
    }

    void put_exceptions(const uint32_t* words) {
        constexpr int stride = exception_words(sizeof(T));
        int64_t previous = -1;
        for (size_t at = 0; at < n_tail_; at += size_t(stride)) {
            uint64_t value = words[at + 1];
            if (stride == 3) value |= uint64_t(words[at + 2]) << 32;
            if (int64_t(words[at]) <= previous || words[at] >= n_changed_ || T(value) != value)
                throw CorruptStream("an exception is out of order or out of range");
            bits_[words[at]] = T(value);
            previous = words[at];
        }
    }

    const Model& model_;
    const Weights& weights_;
    const Places<K> places_;
    AnsReader reader_;
    const GapSlot* slots_ = nullptr;
    uint32_t shift_ = 0;
    uint32_t end_ = 0;   // of the window, in weight space
    uint64_t slot_ = 0;  // of the next event, in weight space
    size_t n_left_ = 0, block_ = 0, group_ = 0;
    uint32_t in_block_ = 0, in_group_ = 0;  // the slot, counted from its block's and its group's start
    Hit hit_ = {};
    const T *old_ = nullptr, *window_old_ = nullptr;
    size_t n_whole_groups_ = 0;
    size_t n_ = 0, n_scanned_ = 0, n_window_ = 0, window_first_ = 0;
    ChunkView chunk_ = {};
    uint32_t first_position_ = 0;
    size_t n_changed_ = 0, n_coded_ = 0, n_popped_ = 0, n_signs_ = 0, n_tail_ = 0;
    const uint32_t* signs_ = nullptr;
    Window window_;
    Buffer<uint32_t> positions_;
    Buffer<T> bits_;  // old ones until begin_steps, then new ones
    Buffer<Coded> coded_;
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
    using Member = ChunkDecoder<K>;

    explicit CompactDecoder(const Model& model) : weights_(model, K::key_mask) {
        for (size_t g = 0; g < gang_size; g++) gang_.emplace_back(new Member(model, weights_));
    }

    // Decodes up to gang_size consecutive chunks into one list each; throws CorruptStream.
    void decode(const T* old, size_t n, size_t chunk, const ChunkView* views, uint32_t first,
                std::vector<uint32_t>* positions, std::vector<T>* bits) {
        size_t n_busy = 0, number[gang_size];
        Member* busy[gang_size];
        for (size_t g = 0; g * chunk < n; g++) {
            const size_t count = std::min(chunk, n - g * chunk);
            const uint32_t first_here = uint32_t(first + g * chunk);
            if (views[g].n_words == 0) {
                if (views[g].head) throw CorruptStream("an empty chunk has a head");
            } else if (views[g].head & head_dense) {
                decode_dense(old + g * chunk, count, views[g], first_here, positions[g], bits[g]);
            } else {
                gang_[g]->begin(old + g * chunk, count, views[g], first_here);
                number[n_busy] = g;
                busy[n_busy++] = gang_[g].get();
            }
        }
        work_in_turns(busy, n_busy, [](Member& m) { return m.reach_event(); }, take_events);
        for (size_t b = 0; b < n_busy; b++) busy[b]->begin_steps();
        work_in_turns(busy, n_busy, [](Member& m) { return m.n_steps_left() > 0; }, pop_steps);
        for (size_t b = 0; b < n_busy; b++) {
            busy[b]->finish();
            positions[number[b]].assign(busy[b]->positions(), busy[b]->positions() + busy[b]->n_changed());
            bits[number[b]].assign(busy[b]->bits(), busy[b]->bits() + busy[b]->n_changed());
        }
    }

  private:
    static void take_events(Member** gang, size_t n) {
        for (size_t g = 0; g < n; g++) gang[g]->find_block();
        for (size_t g = 0; g < n; g++) gang[g]->find_group();
        for (size_t g = 0; g < n; g++) gang[g]->find_element();
        for (size_t g = 0; g < n; g++) gang[g]->flip_element();
        for (size_t g = 0; g < n; g++) gang[g]->pop_gap();
    }
    static void pop_steps(Member** gang, size_t n) {
        for (size_t g = 0; g < n; g++) gang[g]->pop_step();
    }

    const Weights weights_;
    std::vector<std::unique_ptr<Member>> gang_;
};

}  // namespace ww
