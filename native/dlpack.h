// Any object that speaks DLPack, as unsigned integers over the same memory: NumPy's own import refuses
// bfloat16 and the 8-bit floats.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>

namespace ww {

namespace nb = nanobind;

// The safetensors name of a DLPack type; its numbers are fixed by the DLPack standard.
inline std::string type_name(nb::dlpack::dtype dtype) {
    const std::string bits = std::to_string(dtype.bits);
    if (dtype.lanes != 1) return "vector";
    switch (dtype.code) {
        case 0: return "I" + bits;
        case 1: return "U" + bits;
        case 2: return "F" + bits;
        case 4: return "BF" + bits;
        case 5: return dtype.bits == 64 ? "C64" : "complex" + bits;
        case 6: return "BOOL";
        case 10: return "F8_E4M3";  // e4m3fn, the one without infinities
        case 11: return "F8_E4M3FNUZ";
        case 12: return "F8_E5M2";
        case 13: return "F8_E5M2FNUZ";
        case 14: return "F8_E8M0";
        default: return "code " + std::to_string(dtype.code) + " of " + bits + " bits";
    }
}

// Name of the element type and a writable view, or a read-only one where the exporter allows no writes.
template <class Array>
std::pair<std::string, nb::object> view_bits(const Array& array, bool writable) {
    const size_t n_bytes = (array.dtype().bits + 7) / 8;
    const nb::dlpack::dtype integer = {uint8_t(nb::dlpack::dtype_code::UInt), uint8_t(8 * n_bytes), 1};
    std::vector<size_t> shape(array.ndim());
    std::vector<int64_t> strides(array.ndim());
    for (size_t d = 0; d < array.ndim(); d++) {
        shape[d] = array.shape(d);
        strides[d] = array.stride(d);
    }
    const nb::object owner = nb::cast(array);
    if (writable)
        return {type_name(array.dtype()),
                nb::cast(nb::ndarray<nb::numpy>(const_cast<void*>(static_cast<const void*>(array.data())), array.ndim(),
                                                shape.data(), owner, strides.data(), integer))};
    return {type_name(array.dtype()), nb::cast(nb::ndarray<nb::numpy, nb::ro>(array.data(), array.ndim(), shape.data(),
                                                                              owner, strides.data(), integer))};
}

inline void bind_dlpack(nb::module_& m) {
    m.def("dlpack_bits", [](nb::ndarray<nb::device::cpu> array) { return view_bits(array, true); });
    m.def("dlpack_bits", [](nb::ndarray<nb::ro, nb::device::cpu> array) { return view_bits(array, false); });
}

}  // namespace ww
