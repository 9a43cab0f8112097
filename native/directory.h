// The directories of many pieces, chunk by chunk, as the tables that a GPU's decoder reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "compact.h"

namespace ww {

constexpr int64_t span_elements = 4096;  // as kernels/triton/weight_index.py has it

// One entry per chunk; where they are written.
struct ChunkTables {
    int32_t* piece;
    int64_t *start, *n_elements;
    uint32_t* head;
    int64_t* first_word;
    uint32_t* n_words;
    int64_t* first_span;
    uint8_t* is_coded;
};

// Where the next piece's chunks begin.
struct ChunkPlace {
    size_t chunk = 0;
    int64_t word = 0, span = 0;
};

// Writes one piece: rows are the heads and sizes of its n chunks, each of 2^log2 elements but the last.
inline void put_chunks(const uint32_t* rows, size_t n, int64_t size, int log2, int32_t piece, const ChunkTables& out,
                       ChunkPlace& at) {
    for (size_t i = 0; i < n; i++, at.chunk++) {
        const int64_t start = int64_t(i) << log2, n_elements = std::min(size - start, int64_t(1) << log2);
        const uint32_t head = rows[2 * i], n_words = rows[2 * i + 1];
        out.piece[at.chunk] = piece;
        out.start[at.chunk] = start;
        out.n_elements[at.chunk] = n_elements;
        out.head[at.chunk] = head;
        out.first_word[at.chunk] = at.word;
        out.n_words[at.chunk] = n_words;
        out.first_span[at.chunk] = at.span;
        out.is_coded[at.chunk] = n_words > 0 && !(head & head_dense);
        at.word += n_words;
        at.span += (n_elements + span_elements - 1) / span_elements;
    }
}

}  // namespace ww
