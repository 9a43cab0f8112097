// The models of many records from their bytes: the twin of parse_model in codec/model_bytes.py.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "models.h"
#include "tables.h"

namespace ww {

namespace nb = nanobind;

constexpr uint8_t same_table = 0xFF;     // in place of a first token: the table of the class before
constexpr uint8_t expected_flag = 0x10;  // beside a class's weight
constexpr uint8_t two_bytes = 0x80;      // frequencies from here on take two bytes, the first with this bit

// Reads bytes forward and refuses to pass the end.
class ByteReader {
  public:
    ByteReader(const uint8_t* bytes, size_t n) : bytes_(bytes), n_(n) {}

    const uint8_t* take(size_t n) {
        if (n > n_ - at_) throw std::invalid_argument("a record ends inside its class model");
        at_ += n;
        return bytes_ + at_ - n;
    }

    uint8_t byte() { return *take(1); }
    size_t at() const { return at_; }

  private:
    const uint8_t* bytes_;
    size_t n_, at_ = 0;
};

// Reads the models of one element type. Every function throws std::invalid_argument where no writer wrote
// what it finds, in the order and the words of the Python parser.
class ModelParser {
  public:
    ModelParser(uint32_t key_mask, uint32_t max_token) : key_mask_(key_mask), max_token_(max_token) {}

    // The model at the reader's place, with its padding.
    void parse(ByteReader& reader, int32_t& base_key, const ModelRow& row) const {
        parse_head(reader, base_key, *row.chunk_log2);
        parse_classes(reader, row);
        for (int c = 0; c < n_classes; c++) parse_table(reader, c, row);
        const size_t n_padding = -reader.at() % 4;
        const uint8_t* const padding = reader.take(n_padding);
        if (std::any_of(padding, padding + n_padding, [](uint8_t byte) { return byte != 0; }))
            throw std::invalid_argument("a class model's padding is not zero");
    }

  private:
    void parse_head(ByteReader& reader, int32_t& base_key, uint8_t& chunk_log2) const {
        const uint8_t* const head = reader.take(4);
        chunk_log2 = head[0];
        if (chunk_log2 < min_chunk_log2 || chunk_log2 > max_chunk_log2 || head[1])
            throw std::invalid_argument("chunk size 2^" + std::to_string(chunk_log2) + " is out of range");
        base_key = head[2] | head[3] << 8;
        if (uint32_t(base_key) > key_mask_)
            throw std::invalid_argument("class window starts at " + std::to_string(base_key) + ", past every key");
    }

    void parse_classes(ByteReader& reader, const ModelRow& row) const {
        const uint8_t* const classes = reader.take(n_classes);
        bool sound = classes[n_classes - 1] == 0;
        for (int c = 0; c < n_classes; c++) {
            row.log2_weights[c] = classes[c] & ~expected_flag;
            row.expected[c] = (classes[c] & expected_flag) != 0;
            sound &= row.log2_weights[c] <= max_log2_weight;
        }
        if (!sound) throw std::invalid_argument("a class weight is out of range");
    }

    void parse_table(ByteReader& reader, int c, const ModelRow& row) const {
        const uint8_t first = reader.byte();
        if (first == same_table) return repeat_table(c, row);
        const uint8_t count = reader.byte();
        if (count == 0 || first + count - 1u > max_token_)
            throw std::invalid_argument("a step table has " + std::to_string(count) + " tokens from " +
                                        std::to_string(first));
        row.first_token[c] = first;
        row.n_tokens[c] = count;
        uint16_t* const frequencies = row.frequencies + c * n_tokens;
        if (count == 1)
            frequencies[0] = probability_sum;
        else
            parse_frequencies(reader, frequencies, count);
    }

    static void repeat_table(int c, const ModelRow& row) {
        if (c == 0) throw std::invalid_argument("the first step table refers to one before it");
        row.first_token[c] = row.first_token[c - 1];
        row.n_tokens[c] = row.n_tokens[c - 1];
        uint16_t* const frequencies = row.frequencies + c * n_tokens;
        std::copy_n(frequencies - n_tokens, row.n_tokens[c], frequencies);
    }

    static void parse_frequencies(ByteReader& reader, uint16_t* frequencies, int count) {
        uint32_t sum = 0;
        bool has_zero = false;
        for (int t = 0; t < count; t++) {
            frequencies[t] = parse_frequency(reader);
            sum += frequencies[t];
            has_zero |= frequencies[t] == 0;
        }
        if (sum != probability_sum || has_zero)
            throw std::invalid_argument("a step table's frequencies do not sum to 4096");
    }

    static uint16_t parse_frequency(ByteReader& reader) {
        const uint8_t low = reader.byte();
        if (low < two_bytes) return low;
        const uint16_t frequency = uint16_t((low & 0x7F) | reader.byte() << 7);
        if (frequency < two_bytes) throw std::invalid_argument("a step table says a small frequency in two bytes");
        return frequency;
    }

    uint32_t key_mask_, max_token_;
};

// One row for each record.
template <class T, int... extents>
using PerRecord = nb::ndarray<T, nb::shape<-1, extents...>, nb::c_contig, nb::device::cpu>;
using PerClass = PerRecord<uint8_t, n_classes>;
using PerToken = PerRecord<uint16_t, n_classes, n_tokens>;

inline std::vector<ByteReader> readers_of(const nb::list& bodies) {
    using Body = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    std::vector<ByteReader> readers;
    for (const auto item : bodies) {
        // Never converted: a copy would be gone before it is read.
        const auto body = nb::cast<Body>(item, false);
        readers.emplace_back(body.data(), body.size());
    }
    return readers;
}

// Reads the models that bodies of one element type start with: a row of each array, and where the model ends.
// Frequencies are zeros at first. The caller keeps the bodies alive.
inline void parse_models(const nb::list& bodies, uint32_t key_mask, uint32_t max_token, PerRecord<int32_t> base_keys,
                         PerClass log2_weights, PerClass expected, PerClass table_sizes, PerClass first_tokens,
                         PerToken frequencies, PerRecord<uint8_t> chunk_log2, PerRecord<int64_t> ends) {
    std::vector<ByteReader> readers = readers_of(bodies);
    const size_t n = readers.size();
    const auto has_room = [n](const auto&... rows) { return ((rows.shape(0) == n) && ...); };
    if (!has_room(base_keys, log2_weights, expected, table_sizes, first_tokens, frequencies, chunk_log2, ends) ||
        max_token >= uint32_t(n_tokens))
        throw nb::type_error("the arrays for class models have the wrong shape");
    nb::gil_scoped_release release;
    const ModelParser parser(key_mask, max_token);
    for (size_t r = 0; r < n; r++) {
        const size_t at = r * n_classes;
        const ModelRow row = {log2_weights.data() + at, expected.data() + at,
                              table_sizes.data() + at,  first_tokens.data() + at,
                              frequencies.data() + at * n_tokens, chunk_log2.data() + r, nullptr};
        try {
            parser.parse(readers[r], base_keys.data()[r], row);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("model " + std::to_string(r) + ": " + error.what());
        }
        ends.data()[r] = int64_t(readers[r].at());
    }
}

}  // namespace ww
