// The stack coder: writer works backwards and pushes, reader works forwards and pops.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "tables.h"

namespace ww {

constexpr uint64_t ans_low = uint64_t(1) << 32;

// Writes words through a pointer: the caller makes room for one word per push.
class AnsWriter {
  public:
    void restart() {
        next_ = words_.data();
        state_ = ans_low;
    }

    // Room for so many pushes more.
    void reserve(size_t n) {
        const size_t used = n_words();
        words_.make_room(used, used + n);
        next_ = words_.data() + used;
    }

    void push_symbol(const Symbol& symbol) {
        spill(uint64_t(symbol.frequency) << (64 - probability_bits));
        const uint64_t quotient = symbol.divide(state_);
        state_ = (quotient << probability_bits) + (state_ - quotient * symbol.frequency) + symbol.start;
    }
    void push_raw(uint64_t value, int n_bits) {
        if (n_bits == 0) return;
        for (int shift = (n_bits - 1) & ~15; shift >= 0; shift -= 16) {
            const int width = n_bits - shift < 16 ? n_bits - shift : 16;
            spill(uint64_t(1) << (64 - width));
            state_ = (state_ << width) | ((value >> shift) & ((uint64_t(1) << width) - 1));
        }
    }
    uint32_t borrow(uint32_t n_bits) {
        const uint32_t value = uint32_t(state_) & ((1u << n_bits) - 1);
        state_ >>= n_bits;
        return value;
    }
    void push_gap(const GapSymbol& symbol, uint32_t low_bits, uint32_t shift) {
        spill(uint64_t(symbol.frequency) << (64 - probability_bits - shift));
        state_ = symbol.push((state_ << shift) | low_bits);
    }
    uint64_t state() const { return state_; }
    const uint32_t* words() const { return words_.data(); }
    size_t n_words() const { return size_t(next_ - words_.data()); }

  private:
    // Without a branch: whether a word is due is as good as random.
    void spill(uint64_t bound) {
        const unsigned due = state_ >= bound;
        *next_ = uint32_t(state_);
        next_ += due;
        state_ >>= due << 5;
    }

    uint64_t state_ = ans_low;
    uint32_t* next_ = nullptr;
    Buffer<uint32_t> words_;
};

// Never reads past stop: once there, it reads the last word again, and finish finds out.
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
    uint64_t pop_gap(const GapSlot* slots, uint32_t shift) {
        uint64_t quotient = 0;
        uint32_t symbol = take_gap_symbol(slots);
        while (__builtin_expect(symbol == continue_symbol, 0)) {
            if (next_ > stop_) throw CorruptStream("stream ends in the middle of a symbol");
            quotient += continue_symbol;
            refill(ans_low);
            symbol = take_gap_symbol(slots);
        }
        const uint64_t low_bits = state_ & ((uint64_t(1) << shift) - 1);
        state_ >>= shift;
        return ((quotient + symbol) << shift) | low_bits;
    }
    void give_back(uint32_t value, uint32_t n_bits) {
        refill(ans_low >> n_bits);
        state_ = (state_ << n_bits) | value;
    }
    uint32_t pop_symbol(const StepTable& table) {
        const uint32_t slot = uint32_t(state_) & (probability_sum - 1);
        const uint32_t symbol = table.of_slot[slot];
        state_ = table.symbols[symbol].frequency * (state_ >> probability_bits) + slot - table.symbols[symbol].start;
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
    uint32_t take_gap_symbol(const GapSlot* slots) {
        const GapSlot slot = slots[state_ % probability_sum];
        state_ = slot.frequency() * (state_ >> probability_bits) + slot.offset();
        return slot.symbol();
    }
    // Without a branch, like spill.
    void refill(uint64_t bound) {
        const uint64_t longer = (state_ << 32) | *(next_ < stop_ ? next_ : stop_ - 1);
        const bool due = state_ < bound;
        state_ = due ? longer : state_;
        next_ += due;
    }

    uint64_t state_ = 0;
    const uint32_t* next_ = nullptr;
    const uint32_t* stop_ = nullptr;
};

}  // namespace ww
