// Element types as bits: width, where the key (a float's exponent) sits, and the ordered form.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ww {

// One type per dtype family the codec tells apart. Mask 0 means: every element has key 0.
template <class T, int Shift, uint32_t Mask, bool Ordered>
struct Kind {
    using Bits = T;
    using Signed = std::make_signed_t<T>;
    static constexpr int key_shift = Shift;
    static constexpr uint32_t key_mask = Mask;
    static constexpr bool ordered = Ordered;
    static constexpr int n_bits = 8 * sizeof(T);

    static uint32_t key(T bits) { return Mask ? uint32_t(bits >> Shift) & Mask : 0; }

    // The next larger float is one more; -0 and +0 stay apart.
    static T to_ordered(T bits) {
        if (!Ordered) return bits;
        const T sign = T(T(1) << (n_bits - 1));
        return (bits & sign) ? T(~bits) : T(bits | sign);
    }
    static T from_ordered(T value) {
        if (!Ordered) return value;
        const T sign = T(T(1) << (n_bits - 1));
        return (value & sign) ? T(value ^ sign) : T(~value);
    }
};

// A change as a sign and a magnitude less one.
template <class K>
inline typename K::Bits split_step(typename K::Bits from, typename K::Bits to, bool& negative) {
    using T = typename K::Bits;
    const T step = T(K::to_ordered(to) - K::to_ordered(from));
    negative = step >> (K::n_bits - 1);
    return T((negative ? T(T(~step) + 1) : step) - 1);
}

template <class K>
inline typename K::Bits add_step(typename K::Bits from, bool negative, typename K::Bits magnitude) {
    using T = typename K::Bits;
    const T size = T(magnitude + 1);
    return K::from_ordered(T(K::to_ordered(from) + (negative ? T(T(~size) + 1) : size)));
}

// Small magnitudes are their own token; larger ones share one per half octave.
inline uint32_t token_of(uint64_t magnitude) {
    if (magnitude < 4) return uint32_t(magnitude);
    const int exponent = 63 - __builtin_clzll(magnitude);
    return 2 * exponent + ((magnitude >> (exponent - 1)) & 1);
}

inline int raw_bits_of(uint32_t token) { return token < 4 ? 0 : int(token / 2) - 1; }

inline uint64_t magnitude_of(uint32_t token, uint64_t raw) {
    if (token < 4) return token;
    return (uint64_t(2 | (token & 1)) << (token / 2 - 1)) | raw;
}

}  // namespace ww
