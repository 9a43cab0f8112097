// The stack coder: writer works backwards and pushes, reader works forwards and pops.
#pragma once

#include <cstdint>
#include <vector>

#include "tables.h"

namespace ww {

constexpr uint64_t ans_low = uint64_t(1) << 32;

class AnsWriter {
  public:
    explicit AnsWriter(std::vector<uint32_t>& out) : words_(out) { words_.clear(); }

    void push_symbol(const Symbol& symbol) {
        spill(uint64_t(symbol.frequency) << (64 - probability_bits));
        put(symbol);
    }
    void push_raw(uint64_t value, int n_bits) {
        for (int shift = (n_bits - 1) & ~15; n_bits > 0 && shift >= 0; shift -= 16) {
            const int width = n_bits - shift < 16 ? n_bits - shift : 16;
            spill(uint64_t(1) << (64 - width));
            state_ = (state_ << width) | ((value >> shift) & ((uint64_t(1) << width) - 1));
        }
    }
    uint32_t borrow(int n_bits) {
        const uint32_t value = uint32_t(state_) & ((1u << n_bits) - 1);
        state_ >>= n_bits;
        return value;
    }
    void push_gap(const Symbol& symbol, uint32_t low_bits, int shift) {
        spill(uint64_t(symbol.frequency) << (64 - probability_bits - shift));
        state_ = (state_ << shift) | low_bits;
        put(symbol);
    }
    uint64_t state() const { return state_; }

  private:
    void put(const Symbol& symbol) {
        const uint64_t quotient = symbol.divide(state_);
        state_ = (quotient << probability_bits) + (state_ - quotient * symbol.frequency) + symbol.start;
    }
    void spill(uint64_t bound) {
        if (state_ >= bound) {
            words_.push_back(uint32_t(state_));
            state_ >>= 32;
        }
    }

    uint64_t state_ = ans_low;
    std::vector<uint32_t>& words_;
};

class AnsReader {
  public:
    AnsReader() = default;
    AnsReader(const uint32_t* first, const uint32_t* stop) : next_(first), stop_(stop) {
        if (stop - first < 2) throw CorruptStream("stream is shorter than the coder's state");
        state_ = first[0] | (uint64_t(first[1]) << 32);
        next_ += 2;
        if (state_ < ans_low) throw CorruptStream("stream starts with a state out of range");
    }

    // A whole gap; the state is left below its bound until give_back.
    uint64_t pop_gap(const GapTable& table, int shift) {
        uint64_t quotient = 0;
        uint32_t symbol = take(table.symbols, table.of_slot);
        while (__builtin_expect(symbol == continue_symbol, 0)) {
            quotient += continue_symbol;
            refill(ans_low);
            symbol = take(table.symbols, table.of_slot);
        }
        const uint64_t low_bits = state_ & ((uint64_t(1) << shift) - 1);
        state_ >>= shift;
        return ((quotient + symbol) << shift) | low_bits;
    }
    void give_back(uint32_t value, int n_bits) {
        refill(ans_low >> n_bits);
        state_ = (state_ << n_bits) | value;
    }
    uint32_t pop_symbol(const StepTable& table) {
        const uint32_t symbol = take(table.symbols, table.of_slot);
        refill(ans_low);
        return symbol;
    }
    uint64_t pop_raw(int n_bits) {
        uint64_t value = 0;
        for (int shift = 0; shift < n_bits; shift += 16) {
            const int width = n_bits - shift < 16 ? n_bits - shift : 16;
            value |= (state_ & ((uint64_t(1) << width) - 1)) << shift;
            state_ >>= width;
            refill(ans_low);
        }
        return value;
    }
    void finish(const uint32_t* stop) const {
        if (next_ != stop || state_ != ans_low) throw CorruptStream("stream does not end where it must");
    }

  private:
    uint32_t take(const Symbol* symbols, const uint8_t* of_slot) {
        const uint32_t slot = uint32_t(state_) & (probability_sum - 1);
        const uint32_t symbol = of_slot[slot];
        state_ = symbols[symbol].frequency * (state_ >> probability_bits) + slot - symbols[symbol].start;
        return symbol;
    }
    void refill(uint64_t bound) {
        if (state_ < bound) {
            if (__builtin_expect(next_ >= stop_, 0)) throw CorruptStream("stream ends in the middle of a symbol");
            state_ = (state_ << 32) | *next_++;
        }
    }

    uint64_t state_ = 0;
    const uint32_t* next_ = nullptr;
    const uint32_t* stop_ = nullptr;
};

}  // namespace ww
