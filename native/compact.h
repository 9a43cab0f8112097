// The compact codec, chunk by chunk: events placed in weight space, steps by class.
#pragma once

#include <algorithm>

#include "ans.h"
#include "scan.h"

namespace ww {

constexpr uint32_t head_dense = 1u << 21;
constexpr uint32_t head_exceptions = 1u << 22;
constexpr uint32_t head_reserved = 1u << 23;
constexpr uint32_t head_events = head_dense - 1;

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

struct Event {
    uint32_t start;  // where the element's interval begins in weight space
    uint8_t log2_weight;
};

template <class K>
class CompactEncoder {
  public:
    using T = typename K::Bits;

    explicit CompactEncoder(const Model& model) : model_(model), weights_(model) {}

    // Returns the number of changed elements.
    size_t encode(const T* old, const T* now, size_t n, ChunkCode& out) {
        out.head = 0;
        out.words.clear();
        const size_t n_changed = scan_changes(old, now, n, scan_);
        if (n_changed == 0) return 0;
        const size_t dense_words = (n * sizeof(T) + 3) / 4;
        const uint32_t total = scan_weights<K>(old, n, weights_, scan_);
        collect(old, now, n);
        AnsWriter writer(stream_);
        push_steps(writer, now);
        const uint32_t rate = choose_rate(events_.size(), total, model_.max_weight_log2);
        push_gaps(writer, rate);
        assemble(writer, rate, out);
        if (out.words.size() >= dense_words) copy_dense(now, n, out);
        return n_changed;
    }

  private:
    struct Change {
        uint32_t position;
        uint8_t number;  // of its class
        T magnitude;
    };

    void collect(const T* old, const T* now, size_t n) {
        events_.clear();
        changes_.clear();
        signs_.clear();
        exceptions_.clear();
        sign_word_ = n_signs_ = 0;
        for (size_t b = 0; b * block_size < n; b++) {
            const uint64_t changed = scan_.changed[b];
            for (uint64_t left = changed ^ scan_.expected[b]; left; left &= left - 1)
                collect_event(old, b, __builtin_ctzll(left));
            for (uint64_t left = changed; left; left &= left - 1)
                collect_change(old, now, b * block_size + __builtin_ctzll(left));
        }
        if (n_signs_ % 32) signs_.push_back(sign_word_);
    }

    void collect_event(const T* old, size_t block, size_t place) {
        const size_t group = place / group_size;
        const size_t at = block * (block_size / group_size) + group;
        uint32_t start = at ? scan_.group_end[at - 1] : 0;
        const T* p = old + block * block_size;
        for (size_t i = group * group_size; i < place; i++)
            start += weights_.weight[weights_.class_of_key(K::key(p[i]))];
        events_.push_back({start, weights_.log2_weight[weights_.class_of_key(K::key(p[place]))]});
    }

    void collect_change(const T* old, const T* now, size_t at) {
        bool negative;
        const T magnitude = split_step<K>(old[at], now[at], negative);
        const uint32_t number = model_.class_of_key(K::key(old[at]));
        sign_word_ |= uint32_t(negative) << (n_signs_ % 32);
        if (++n_signs_ % 32 == 0) {
            signs_.push_back(sign_word_);
            sign_word_ = 0;
        }
        changes_.push_back({uint32_t(at), uint8_t(number), magnitude});
    }

    void push_steps(AnsWriter& writer, const T* now) {
        for (size_t i = changes_.size(); i-- > 0;) {
            const Change& change = changes_[i];
            const StepTable& table = model_.steps[change.number];
            uint32_t token = token_of(change.magnitude);
            if (table.n == 1 && token == 0 && table.tokens[0] == 0) continue;
            uint64_t raw = change.magnitude & ((uint64_t(1) << raw_bits_of(token)) - 1);
            uint32_t symbol = table.symbol_of_token[token];
            if (symbol == no_symbol) {
                add_exception(uint32_t(i), now[change.position]);
                symbol = 0;
                token = table.tokens[0];
                raw = 0;
            }
            writer.push_raw(raw, raw_bits_of(token));
            if (table.n > 1) writer.push_symbol(table.symbols[symbol]);
        }
    }

    // Collected backwards, so each exception's words are backwards too.
    void add_exception(uint32_t ordinal, T bits) {
        if constexpr (sizeof(T) == 8) exceptions_.push_back(uint32_t(bits >> 32));
        exceptions_.push_back(uint32_t(bits));
        exceptions_.push_back(ordinal);
    }

    void push_gaps(AnsWriter& writer, uint32_t rate) {
        const GapTable& table = gap_table(rate % 8);
        const int shift = int(rate / 8);
        const uint32_t low_mask = (1u << shift) - 1;
        for (size_t i = events_.size(); i-- > 0;) {
            const uint32_t previous = i ? events_[i - 1].start + (1u << events_[i - 1].log2_weight) : 0;
            const uint32_t gap = events_[i].start + writer.borrow(events_[i].log2_weight) - previous;
            uint32_t quotient = gap >> shift, n_again = 0;
            if (__builtin_expect(quotient >= continue_symbol, 0)) {
                n_again = quotient / continue_symbol;
                quotient %= continue_symbol;
            }
            writer.push_gap(table.symbols[quotient], gap & low_mask, shift);
            for (; n_again; n_again--) writer.push_symbol(table.symbols[continue_symbol]);
        }
    }

    void assemble(const AnsWriter& writer, uint32_t rate, ChunkCode& out) {
        out.head = uint32_t(events_.size()) | rate << 24;
        const size_t n_exceptions = exceptions_.size() / exception_words(sizeof(T));
        if (n_exceptions) {
            out.head |= head_exceptions;
            out.words.push_back(uint32_t(n_exceptions));
        }
        out.words.push_back(uint32_t(writer.state()));
        out.words.push_back(uint32_t(writer.state() >> 32));
        out.words.insert(out.words.end(), stream_.rbegin(), stream_.rend());
        out.words.insert(out.words.end(), signs_.begin(), signs_.end());
        out.words.insert(out.words.end(), exceptions_.rbegin(), exceptions_.rend());
    }

    const Model& model_;
    const Weights weights_;
    Scan scan_;
    std::vector<Event> events_;
    std::vector<Change> changes_;
    std::vector<uint32_t> stream_, signs_, exceptions_;
    uint32_t sign_word_ = 0;
    size_t n_signs_ = 0;
};

// ------------------------------------------------------------------------------------------------- decode

template <class K>
class CompactDecoder {
  public:
    using T = typename K::Bits;

    explicit CompactDecoder(const Model& model) : model_(model), weights_(model) {}

    // Appends positions (offset by first) and new bits; throws CorruptStream.
    template <class P>
    void decode(const T* old, size_t n, uint32_t head, const uint32_t* words, size_t n_words, P first,
                std::vector<P>& positions, std::vector<T>& bits) {
        if (n_words == 0) {
            if (head) throw CorruptStream("an empty chunk has a head");
        } else if (head & head_dense) {
            decode_dense(old, n, head, words, n_words, first, positions, bits);
        } else {
            decode_coded(old, n, head, words, n_words, first, positions, bits);
        }
    }

  private:
    template <class P>
    void decode_dense(const T* old, size_t n, uint32_t head, const uint32_t* words, size_t n_words, P first,
                      std::vector<P>& positions, std::vector<T>& bits) {
        if (head != head_dense || n_words != (n * sizeof(T) + 3) / 4)
            throw CorruptStream("a dense chunk has the wrong size");
        const uint8_t* raw = reinterpret_cast<const uint8_t*>(words);
        for (size_t i = n * sizeof(T); i < n_words * 4; i++)
            if (raw[i]) throw CorruptStream("a dense chunk's padding is not zero");
        for (size_t i = 0; i < n; i++) {
            T value;
            std::memcpy(&value, raw + i * sizeof(T), sizeof(T));
            if (value == old[i]) continue;
            positions.push_back(P(first + i));
            bits.push_back(value);
        }
    }

    template <class P>
    void decode_coded(const T* old, size_t n, uint32_t head, const uint32_t* words, size_t n_words, P first,
                      std::vector<P>& positions, std::vector<T>& bits) {
        const size_t n_events = head & head_events;
        const uint32_t rate = head >> 24;
        if ((head & head_reserved) || n_events > n || rate > max_rate)
            throw CorruptStream("a chunk's head is out of range");
        if (model_.max_weight_log2 > int(rate / 8) + headroom_log2)
            throw CorruptStream("a chunk's rate is too high for its weights");
        const bool has_exceptions = head & head_exceptions;
        AnsReader reader(words + has_exceptions, words + n_words);
        const uint32_t total = scan_weights<K>(old, n, weights_, scan_);
        pop_gaps(reader, old, n, n_events, rate, total);
        list_changes(n);
        const size_t tail = has_exceptions ? exception_tail(words[0]) : 0;
        const size_t n_signs = (changed_.size() + 31) / 32;
        if (n_words < has_exceptions + 2 + n_signs + tail) throw CorruptStream("stream does not end where it must");
        const uint32_t* first_sign = words + n_words - tail - n_signs;
        const size_t before = positions.size();
        pop_steps(reader, old, first_sign, first, positions, bits);
        reader.finish(first_sign);
        check_signs(first_sign, n_signs);
        put_exceptions(words + n_words - tail, tail, bits.data() + before);
    }

    // Flips a bit of scan_.expected for every event, so that what is left there is the change mask.
    void pop_gaps(AnsReader& reader, const T* old, size_t n, size_t n_events, uint32_t rate, uint32_t total) {
        const GapTable& table = gap_table(rate % 8);
        const int shift = int(rate / 8);
        uint64_t slot = 0;
        size_t group = 0;
        for (size_t e = 0; e < n_events; e++) {
            slot += reader.pop_gap(table, shift);
            if (slot >= total) throw CorruptStream("a position lies past the end of its chunk");
            while (scan_.group_end[group] <= slot) group++;
            uint32_t start = group ? scan_.group_end[group - 1] : 0;
            size_t i = group * group_size;
            uint32_t c = weights_.class_of_key(K::key(old[i]));
            while (start + weights_.weight[c] <= slot) {
                start += weights_.weight[c];
                c = weights_.class_of_key(K::key(old[++i]));
            }
            reader.give_back(uint32_t(slot) - start, weights_.log2_weight[c]);
            scan_.expected[i / block_size] ^= uint64_t(1) << (i % block_size);
            slot = start + weights_.weight[c];
        }
        (void)n;
    }

    void list_changes(size_t n) {
        changed_.clear();
        for (size_t b = 0; b * block_size < n; b++)
            for (uint64_t left = scan_.expected[b]; left; left &= left - 1)
                changed_.push_back(uint32_t(b * block_size + __builtin_ctzll(left)));
    }

    size_t exception_tail(uint32_t n_exceptions) const {
        if (n_exceptions == 0 || n_exceptions > changed_.size())
            throw CorruptStream("more exceptions than changes");
        return size_t(n_exceptions) * exception_words(sizeof(T));
    }

    template <class P>
    void pop_steps(AnsReader& reader, const T* old, const uint32_t* signs, P first,
                   std::vector<P>& positions, std::vector<T>& bits) {
        const size_t before = positions.size();
        positions.resize(before + changed_.size());
        bits.resize(before + changed_.size());
        for (size_t i = 0; i < changed_.size(); i++) {
            const T from = old[changed_[i]];
            const StepTable& table = model_.steps[model_.class_of_key(K::key(from))];
            uint32_t token = table.tokens[0];
            if (table.n > 1) token = table.tokens[reader.pop_symbol(table)];
            const T magnitude = T(magnitude_of(token, reader.pop_raw(raw_bits_of(token))));
            const bool negative = (signs[i / 32] >> (i % 32)) & 1;
            positions[before + i] = P(first + changed_[i]);
            bits[before + i] = add_step<K>(from, negative, magnitude);
        }
    }

    void check_signs(const uint32_t* signs, size_t n_words) const {
        const size_t used = changed_.size() % 32;
        if (used && signs[n_words - 1] >> used) throw CorruptStream("sign bits past the last change are not zero");
    }

    void put_exceptions(const uint32_t* words, size_t n_words, T* bits) const {
        const int stride = exception_words(sizeof(T));
        int64_t previous = -1;
        for (size_t at = 0; at < n_words; at += size_t(stride)) {
            uint64_t value = words[at + 1];
            if (stride == 3) value |= uint64_t(words[at + 2]) << 32;
            const bool fits = sizeof(T) >= 4 || value >> (8 * sizeof(T) % 64) == 0;
            if (int64_t(words[at]) <= previous || words[at] >= changed_.size() || !fits)
                throw CorruptStream("an exception is out of order or out of range");
            bits[words[at]] = T(value);
            previous = words[at];
        }
    }

    const Model& model_;
    const Weights weights_;
    Scan scan_;
    std::vector<uint32_t> changed_;
};

}  // namespace ww
