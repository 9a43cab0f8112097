// The plain codec: positions and absolute new bits, per chunk of 2^16 elements; decodes without a base.
#pragma once

#include "scan.h"

namespace ww {

constexpr size_t plain_chunk = size_t(1) << 16;
enum PlainMode : uint32_t { plain_sparse = 0, plain_bitmap = 1, plain_dense = 2 };

// Payload bytes of a chunk, known from its directory word alone.
inline size_t plain_chunk_bytes(uint32_t head, size_t n, size_t n_bytes) {
    const size_t n_changed = head & 0xFFFFFF;
    const uint32_t mode = head >> 24;
    if (n_changed > n || mode > plain_dense || (mode && !n_changed))
        throw CorruptStream("a plain chunk's head is out of range");
    size_t size = n * n_bytes;
    if (mode == plain_sparse) size = n_changed * (2 + n_bytes);
    if (mode == plain_bitmap) size = (n + 7) / 8 + n_changed * n_bytes;
    return (size + 3) & ~size_t(3);
}

inline uint32_t choose_plain_head(size_t n_changed, size_t n, size_t n_bytes) {
    uint32_t best = uint32_t(n_changed);
    if (n_changed == 0) return 0;
    for (uint32_t mode : {plain_bitmap, plain_dense}) {
        const uint32_t head = uint32_t(n_changed) | mode << 24;
        if (plain_chunk_bytes(head, n, n_bytes) < plain_chunk_bytes(best, n, n_bytes)) best = head;
    }
    return best;
}

// What one thread needs to find a chunk's changes: a bit per element, and with `Keep` their places.
struct PlainScratch {
    std::vector<uint64_t> marked = std::vector<uint64_t>(plain_chunk / block_size);
    std::vector<uint32_t> places = std::vector<uint32_t>(plain_chunk + 2);
};

// Codes a chunk; returns the number of changed elements. With `Keep`, their places are in the scratch.
template <bool Keep, class T>
size_t encode_plain_chunk(const T* old, const T* now, size_t n, PlainScratch& scratch, uint32_t& head,
                          std::vector<uint8_t>& out) {
    const uint64_t* marked = scratch.marked.data();
    uint32_t* kept = scratch.places.data();
    const size_t n_changed = scan_changes(old, now, n, scratch.marked.data());
    head = choose_plain_head(n_changed, n, sizeof(T));
    out.assign(plain_chunk_bytes(head, n, sizeof(T)), 0);
    if (head >> 24 == plain_dense) {
        std::memcpy(out.data(), now, n * sizeof(T));
        if (Keep) list_bits(marked, (n + block_size - 1) / block_size, 0, kept);
        return n_changed;
    }
    const bool bitmap = head >> 24 == plain_bitmap;
    uint8_t* where = out.data();
    uint8_t* values = where + (bitmap ? (n + 7) / 8 : 2 * n_changed);
    if (bitmap) std::memcpy(where, marked, (n + 7) / 8);
    for (size_t b = 0; b * block_size < n; b++)
        for (uint64_t left = marked[b]; left; left &= left - 1) {
            const size_t at = b * block_size + size_t(__builtin_ctzll(left));
            std::memcpy(values, now + at, sizeof(T));
            values += sizeof(T);
            if (Keep) *kept++ = uint32_t(at);
            if (bitmap) continue;
            const uint16_t place = uint16_t(at);
            std::memcpy(where, &place, 2);
            where += 2;
        }
    return n_changed;
}

inline void list_plain_positions(uint32_t head, size_t n, const uint8_t* part, std::vector<uint32_t>& places) {
    const size_t n_changed = head & 0xFFFFFF;
    places.clear();
    if (head >> 24 == plain_dense) {
        for (size_t i = 0; i < n; i++) places.push_back(uint32_t(i));
    } else if (head >> 24 == plain_bitmap) {
        for (size_t byte = 0; byte < (n + 7) / 8; byte++)
            for (uint32_t left = part[byte]; left; left &= left - 1)
                places.push_back(uint32_t(8 * byte) + uint32_t(__builtin_ctz(left)));
    } else {
        for (size_t i = 0; i < n_changed; i++) {
            uint16_t place;
            std::memcpy(&place, part + 2 * i, 2);
            if (i && place <= places.back()) throw CorruptStream("positions are not strictly ascending");
            places.push_back(place);
        }
    }
    const size_t count = head >> 24 == plain_dense ? n : n_changed;
    if (places.size() != count || (count && places.back() >= n))
        throw CorruptStream("a plain chunk's positions do not match its head");
}

template <class T, class P>
void decode_plain_chunk(uint32_t head, size_t n, const uint8_t* part, size_t n_part, P first,
                        std::vector<uint32_t>& places, std::vector<P>& positions, std::vector<T>& bits) {
    list_plain_positions(head, n, part, places);
    const uint32_t mode = head >> 24;
    const size_t split = mode == plain_dense ? 0 : mode == plain_bitmap ? (n + 7) / 8 : 2 * places.size();
    for (size_t i = split + places.size() * sizeof(T); i < n_part; i++)
        if (part[i]) throw CorruptStream("a plain chunk's padding is not zero");
    const size_t before = bits.size();
    bits.resize(before + places.size());
    if (!places.empty()) std::memcpy(bits.data() + before, part + split, places.size() * sizeof(T));
    for (uint32_t place : places) positions.push_back(P(first + place));
}

}  // namespace ww
