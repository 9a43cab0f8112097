// The model of a piece and the fixed gap tables, laid out for the inner loops.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace ww {

constexpr int n_classes = 16;
constexpr int n_tokens = 128;
constexpr int probability_bits = 12;
constexpr uint32_t probability_sum = 1u << probability_bits;
constexpr int continue_symbol = 24;
constexpr int max_gap_shift = 20;
constexpr uint32_t max_rate = 8 * max_gap_shift + 7;
constexpr int headroom_log2 = 2;
constexpr int max_log2_weight = 8;

// Anything a decoder finds that no encoder wrote.
struct CorruptStream : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// floor(x / divisor) for every 64-bit x: one wide multiply and two shifts instead of a division.
struct Divider {
    uint64_t magic = 0;
    int shift = -1;  // -1: the divisor is 1

    Divider() = default;
    explicit Divider(uint32_t divisor) {
        if (divisor == 1) return;
        const int log2_up = 32 - __builtin_clz(divisor - 1);
        const unsigned __int128 one = 1;
        const unsigned __int128 excess = (one << log2_up) - divisor;
        magic = excess ? uint64_t((excess << 64) / divisor) + 1 : 0;
        shift = log2_up - 1;
    }
    uint64_t operator()(uint64_t x) const {
        if (__builtin_expect(shift < 0, 0)) return x;
        const uint64_t high = uint64_t(((unsigned __int128)x * magic) >> 64);
        return (((x - high) >> 1) + high) >> shift;
    }
};

// Symbols that own consecutive slots of [0, 2^12).
struct Symbol {
    uint16_t start = 0;
    uint16_t frequency = 0;
    Divider divide;
};

// A symbol as the writer wants it: state / frequency by one wide multiply, right below 2^63, which no
// state reaches here: a gap's frequency is at most 2^10, and a state stays below frequency * 2^52.
struct GapSymbol {
    uint64_t reciprocal;
    uint16_t frequency, rest, bias;  // rest: 2^12 less the frequency
    uint16_t shift;

    GapSymbol() = default;
    GapSymbol(uint32_t start, uint32_t count)
        : reciprocal(~uint64_t(0)), frequency(uint16_t(count)), rest(uint16_t(probability_sum - count)),
          bias(uint16_t(start)), shift(0) {
        if (count == 1) {  // the multiply then gives one less than the state
            bias = uint16_t(start + probability_sum - 1);
            return;
        }
        shift = uint16_t(31 - __builtin_clz(count - 1));
        reciprocal = uint64_t((((unsigned __int128)1 << (64 + shift)) + count - 1) / count);
    }
    uint64_t push(uint64_t state) const {
        const uint64_t quotient = uint64_t(((unsigned __int128)state * reciprocal) >> 64) >> shift;
        return state + bias + quotient * rest;
    }
};

// What the reader finds at a slot: symbol, the slot's offset in it, and its frequency, in one load.
struct GapSlot {
    uint32_t packed;

    GapSlot() = default;
    GapSlot(uint32_t symbol, uint32_t offset, uint32_t frequency) : packed(symbol | offset << 8 | frequency << 20) {}
    uint32_t symbol() const { return packed & 0xFF; }
    uint32_t offset() const { return (packed >> 8) & (probability_sum - 1); }
    uint32_t frequency() const { return packed >> 20; }
};

struct GapTable {
    GapSymbol symbols[continue_symbol + 1];
    GapSlot slots[probability_sum];

    explicit GapTable(uint32_t decay_q16) {
        uint64_t tail = uint64_t(probability_sum) << 16;
        uint32_t cumulative[continue_symbol + 2];
        for (int s = 0; s <= continue_symbol; s++) {
            cumulative[s] = probability_sum - uint32_t((tail + 0x8000) >> 16);
            tail = (tail * decay_q16) >> 16;
        }
        cumulative[continue_symbol + 1] = probability_sum;
        for (int s = 0; s <= continue_symbol; s++) {
            const uint32_t start = cumulative[s], frequency = cumulative[s + 1] - start;
            symbols[s] = GapSymbol(start, frequency);
            for (uint32_t i = 0; i < frequency; i++) slots[start + i] = GapSlot(uint32_t(s), i, frequency);
        }
    }
};

inline const GapTable& gap_table(uint32_t fraction) {
    static const GapTable tables[8] = {
        GapTable(51039), GapTable(52110), GapTable(53111), GapTable(54045),
        GapTable(54917), GapTable(55729), GapTable(56484), GapTable(57185)};
    return tables[fraction];
}

inline uint32_t choose_rate(uint64_t n_events, uint64_t total_weight, int max_weight_log2) {
    static const uint64_t borders[8] = {62757, 68438, 74632, 81386, 88752, 96785, 105545, 115098};
    uint32_t rate = 8 * uint32_t(max_weight_log2 > headroom_log2 ? max_weight_log2 - headroom_log2 : 0);
    while (rate < max_rate) {
        const uint32_t next = rate + 1;
        const uint64_t border = borders[next % 8] << (2 + next / 8);
        // Both products stay below 2^63: total < 2^32, n_events <= 2^20, border < 2^39.
        if ((total_weight << 16) < n_events * border) break;
        rate = next;
    }
    return rate;
}

constexpr uint8_t no_symbol = 255;

struct StepTable {
    int n = 0;
    bool one_step = false;  // every change is one step up or down: nothing is coded
    uint8_t tokens[n_tokens];
    uint8_t symbol_of_token[n_tokens];
    Symbol symbols[n_tokens];
    uint8_t of_slot[probability_sum];

    // False when the frequencies do not sum to 2^12 or a token is out of order or out of range.
    bool load(int count, const uint8_t* token, const uint16_t* frequency, uint32_t max_token) {
        std::memset(symbol_of_token, no_symbol, sizeof symbol_of_token);
        n = count;
        uint32_t start = 0;
        for (int s = 0; s < count; s++) {
            const bool in_order = s == 0 || token[s] > token[s - 1];
            if (!in_order || token[s] > max_token || frequency[s] == 0) return false;
            if (start + frequency[s] > probability_sum) return false;
            tokens[s] = token[s];
            symbol_of_token[token[s]] = uint8_t(s);
            symbols[s].start = uint16_t(start);
            symbols[s].frequency = frequency[s];
            symbols[s].divide = Divider(frequency[s]);
            if (count > 1) std::memset(of_slot + start, s, frequency[s]);
            start += frequency[s];
        }
        one_step = count == 1 && token[0] == 0;
        return count > 0 && start == probability_sum;
    }
};

struct Model {
    uint32_t base_key = 0;
    uint8_t log2_weight[n_classes];
    bool expected[n_classes];
    int max_weight_log2 = 0;
    std::vector<StepTable> steps = std::vector<StepTable>(n_classes);
};

}  // namespace ww
