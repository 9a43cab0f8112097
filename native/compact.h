// What both directions of the compact codec share: heads, and working in turns.
#pragma once

#include <cstddef>

#include "ans.h"
#include "scan.h"

namespace ww {

constexpr uint32_t head_dense = 1u << 21;
constexpr uint32_t head_exceptions = 1u << 22;
constexpr uint32_t head_reserved = 1u << 23;
constexpr uint32_t head_events = head_dense - 1;

constexpr int exception_words(size_t n_bytes) { return n_bytes == 8 ? 3 : 2; }

// How many chunks one thread codes in turns. Coding is a chain of dependent steps: while one chunk waits
// for its multiply, the others go on.
constexpr size_t gang_size = 4;

// Takes steps until no member has any left: side by side while all do, then one member at a time.
template <size_t N, class Member, class HasStep, class TakeSteps>
void step_together(Member** gang, HasStep has_step, TakeSteps take_steps) {
    const auto all_have = [&] {
        for (size_t g = 0; g < N; g++)
            if (!has_step(*gang[g])) return false;
        return true;
    };
    while (all_have()) take_steps(gang, N);
}

template <class Member, class HasStep, class TakeSteps>
void work_in_turns(Member** gang, size_t n, HasStep has_step, TakeSteps take_steps) {
    if (n == 4) step_together<4>(gang, has_step, take_steps);
    if (n == 3) step_together<3>(gang, has_step, take_steps);
    if (n == 2) step_together<2>(gang, has_step, take_steps);
    for (size_t g = 0; g < n; g++)
        while (has_step(*gang[g])) take_steps(gang + g, 1);
}

}  // namespace ww
