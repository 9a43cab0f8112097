// From sums by class to the models of many pieces: the twin of codec/classes.py, integers only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "tables.h"

namespace ww {

constexpr int max_count_log2 = 30;  // below it the square of a product of two rates fits 128 bits
constexpr int64_t rare_to_skip_coding = 1024;
constexpr int spare_tokens = 3;
constexpr int twice_changes_log2 = 23;
constexpr int64_t many_per_change = 1 << 16;
constexpr int min_chunk_log2 = 10, max_chunk_log2 = 20;

// Where the model of one piece goes: a row of each array that the encoder takes.
struct ModelRow {
    uint8_t *log2_weights, *expected, *n_tokens, *first_token;  // one entry per class
    uint16_t* frequencies;                                      // n_tokens per class, zeros at first
    uint8_t* chunk_log2;
    int64_t* n_listed;  // elements of the sample that changed or are expected to
};

// What the sample shows of a class.
struct ClassCounts {
    int64_t n_elements = 0, n_changed = 0, peak = 0;
    int first = 0, last = -1, main = 0;  // tokens seen: the first, the last, the commonest

    bool expected() const { return 2 * n_changed > n_elements; }
    int64_t n_events() const { return expected() ? n_elements - n_changed : n_changed; }
};

// A fraction.
struct Rate {
    uint64_t numerator, denominator;

    // Events per element: -ln(1 - p), to third order in p, with p never 0.
    Rate(int64_t n_events, int64_t n_elements) {
        const uint64_t odd = 2 * uint64_t(n_events) + 1, even = 2 * uint64_t(n_elements) + 2;
        numerator = 2 * odd;
        denominator = 2 * even - odd;
    }
};

inline int bit_length(unsigned __int128 x) {
    const uint64_t high = uint64_t(x >> 64), low = uint64_t(x);
    return high ? 128 - __builtin_clzll(high) : low ? 64 - __builtin_clzll(low) : 0;
}

// round(log2(numerator / denominator)), exactly: the log2 of the squared ratio, halved.
inline int rounded_log2(uint64_t numerator, uint64_t denominator) {
    const unsigned __int128 square = (unsigned __int128)numerator * numerator;
    const unsigned __int128 unit = (unsigned __int128)denominator * denominator;
    const int power = bit_length(square) - bit_length(unit);
    const bool reached = power >= 0 ? square >= unit << power : square << -power >= unit;
    return ((reached ? power : power - 1) + 1) >> 1;
}

template <class Count>
class ModelBuilder {
  public:
    explicit ModelBuilder(uint32_t max_token) : max_token_(int(max_token)) {}

    // by_token: n_tokens counts of changes per class. Throws when no survey can have given the counts.
    void build(const Count* by_token, const int64_t* n_elements, const ModelRow& row) {
        for (int c = 0; c < n_classes; c++) classes_[c] = count(by_token + c * n_tokens, n_elements[c]);
        int weights[n_classes];
        find_weights(weights);
        *row.n_listed = 0;
        for (int c = 0; c < n_classes; c++) {
            const int like = nearest_present(c);
            const bool is_last = c == n_classes - 1;  // always of weight 1 and never expected to change
            row.log2_weights[c] = is_last ? 0 : uint8_t(weights[like]);
            row.expected[c] = is_last ? 0 : classes_[like].expected();
            put_table(by_token + like * n_tokens, classes_[like], c, row);
            *row.n_listed += row.expected[c] ? classes_[c].n_elements : classes_[c].n_changed;
        }
        *row.chunk_log2 = chunk_log2();
    }

  private:
    ClassCounts count(const Count* by_token, int64_t n_elements) const {
        Count seen = 0, beyond = 0;
        for (int t = 0; t <= max_token_; t++) seen |= by_token[t];
        for (int t = max_token_ + 1; t < n_tokens; t++) beyond |= by_token[t];
        if ((uint64_t(int64_t(seen)) | uint64_t(n_elements)) >> max_count_log2)
            throw std::invalid_argument("a count is out of range");
        if (beyond) throw std::invalid_argument("a token is out of range");
        ClassCounts found;
        found.n_elements = n_elements;
        for (int t = 0; t <= max_token_; t++) found.n_changed += by_token[t];
        if (found.n_changed > n_elements) throw std::invalid_argument("more changes than elements");
        if (found.n_changed) find_tokens(by_token, found);
        return found;
    }

    void find_tokens(const Count* by_token, ClassCounts& found) const {
        while (by_token[found.first] == 0) found.first++;
        for (found.last = max_token_; by_token[found.last] == 0;) found.last--;
        const Count* const main = std::max_element(by_token + found.first, by_token + found.last + 1);
        found.main = int(main - by_token);
        found.peak = int64_t(*main);
    }

    // Rates rounded to powers of two, relative to the class with the most events.
    void find_weights(int* weights) const {
        int anchor_class = 0, lowest = INT32_MAX, highest = INT32_MIN;
        for (int c = 1; c < n_classes; c++)
            if (classes_[c].n_events() > classes_[anchor_class].n_events()) anchor_class = c;
        const Rate anchor = rate(anchor_class);
        for (int c = 0; c < n_classes; c++) {
            const Rate own = rate(c);
            weights[c] = rounded_log2(own.numerator * anchor.denominator, own.denominator * anchor.numerator);
            if (classes_[c].n_elements == 0) continue;
            lowest = std::min(lowest, weights[c]);
            highest = std::max(highest, weights[c]);
        }
        const int floor = lowest > highest ? 0 : std::max(lowest, highest - max_log2_weight);
        for (int c = 0; c < n_classes; c++) weights[c] = std::clamp(weights[c] - floor, 0, max_log2_weight);
    }

    Rate rate(int c) const { return Rate(classes_[c].n_events(), classes_[c].n_elements); }

    // The nearest class the sample has seen, the lower one of two: what the unseen ones go by.
    int nearest_present(int c) const {
        for (int away = 0; away < n_classes; away++) {
            if (c - away >= 0 && classes_[c - away].n_elements) return c - away;
            if (c + away < n_classes && classes_[c + away].n_elements) return c + away;
        }
        return c;
    }

    void put_table(const Count* by_token, const ClassCounts& found, int c, const ModelRow& row) const {
        const bool is_coded = (found.n_changed - found.peak) * rare_to_skip_coding > found.n_changed;
        const int first = is_coded ? std::max(0, found.first - spare_tokens) : found.main;
        const int last = is_coded ? std::min(max_token_, found.last + spare_tokens) : found.main;
        uint16_t* const frequencies = row.frequencies + c * n_tokens;
        row.first_token[c] = uint8_t(first);
        row.n_tokens[c] = uint8_t(last - first + 1);
        int64_t sum = 0;
        for (int t = first; t <= last && is_coded; t++) {
            const int64_t share = int64_t(by_token[t]) * probability_sum / found.n_changed;
            frequencies[t - first] = uint16_t(std::max<int64_t>(1, share));
            sum += frequencies[t - first];
        }
        // The commonest takes up the rounding; in a table of one token it is all there is.
        frequencies[found.main - first] = uint16_t(frequencies[found.main - first] + probability_sum - sum);
    }

    // The chunk size that gives chunks of 2^10.5 to 2^11.5 changes.
    uint8_t chunk_log2() const {
        int64_t n_elements = 0, n_changed = 0;
        for (const ClassCounts& found : classes_) {
            n_elements += found.n_elements;
            n_changed += found.n_changed;
        }
        const int64_t mean = n_elements / std::max<int64_t>(1, n_changed);
        const uint64_t per_change = uint64_t(std::clamp<int64_t>(mean, 1, many_per_change));
        const int log2 = (bit_length(per_change * per_change << twice_changes_log2) - 1) / 2;
        return uint8_t(std::clamp(log2, min_chunk_log2, max_chunk_log2));
    }

    int max_token_;
    ClassCounts classes_[n_classes];
};

}  // namespace ww
