// Cast, for the pairs of types and rounding modes that Atlas A2/A3 document.
//
// A Cast to integers saturates; a Cast to half or bfloat16 overflows to infinity. Not modelled: CAST_ODD, int64, int32
// to half (which needs SetDeqScale), int4b_t and uint8_t as destinations.
#pragma once
#include <cmath>
#include <limits>

#include "engine.h"

namespace twin {
using AscendC::RoundMode;

constexpr uint32_t kNone = 1u << int(RoundMode::CAST_NONE);
constexpr uint32_t kDirected = 1u << int(RoundMode::CAST_RINT) | 1u << int(RoundMode::CAST_FLOOR) |
                               1u << int(RoundMode::CAST_CEIL) | 1u << int(RoundMode::CAST_ROUND) |
                               1u << int(RoundMode::CAST_TRUNC);

template <class D, class S> constexpr uint32_t cast_modes() {  // 0: no such Cast
    auto pair = [](auto d, auto s) { return std::is_same_v<D, decltype(d)> && std::is_same_v<S, decltype(s)>; };
    if (pair(half{}, int4b_t{}) || pair(half{}, int8_t{}) || pair(half{}, uint8_t{}) || pair(float{}, int16_t{}) ||
        pair(float{}, half{}) || pair(float{}, bfloat16_t{}))
        return kNone;
    if (pair(half{}, int16_t{}) || pair(float{}, int32_t{}) || pair(half{}, float{}) || pair(int8_t{}, half{}))
        return kNone | kDirected;
    if (pair(int16_t{}, half{}) || pair(int32_t{}, half{}) || pair(int32_t{}, bfloat16_t{}) ||
        pair(int16_t{}, float{}) || pair(int32_t{}, float{}) || pair(bfloat16_t{}, float{}) || pair(float{}, float{}))
        return kDirected;
    return 0;
}

inline double to_whole(double x, RoundMode mode) {
    switch (mode) {
        case RoundMode::CAST_FLOOR: return std::floor(x);
        case RoundMode::CAST_CEIL: return std::ceil(x);
        case RoundMode::CAST_ROUND: return std::round(x);
        case RoundMode::CAST_TRUNC: return std::trunc(x);
        default: return std::nearbyint(x);
    }
}

template <class D> D nearest(float x) {
    if constexpr (std::is_same_v<D, bfloat16_t>)
        return to_bfloat16(x);
    else
        return static_cast<D>(x);
}

// Converts x to a narrower float. The bits of a float without its sign, taken as an integer, grow with its magnitude,
// which gives the neighbours.
template <class D> D to_narrow(double x, RoundMode mode) {
    const D near = nearest<D>(static_cast<float>(x));
    const double found = to_float(near);
    if (found == x || x != x || mode == RoundMode::CAST_RINT || mode == RoundMode::CAST_NONE) return near;
    uint16_t bits;
    std::memcpy(&bits, &near, 2);
    const bool above = std::fabs(found) > std::fabs(x);  // in magnitude
    const uint16_t small = above ? bits - 1 : bits, large = above ? bits : bits + 1;
    D inner, outer;
    std::memcpy(&inner, &small, 2), std::memcpy(&outer, &large, 2);
    const bool negative = x < 0;
    switch (mode) {
        case RoundMode::CAST_FLOOR: return negative ? outer : inner;
        case RoundMode::CAST_CEIL: return negative ? inner : outer;
        case RoundMode::CAST_TRUNC: return inner;
        default:  // CAST_ROUND: ties away from zero
            return std::fabs(x - to_float(inner)) < std::fabs(to_float(outer) - x) ? inner : outer;
    }
}

template <class D, class S> D cast_one(S value, RoundMode mode) {
    if constexpr (std::is_integral_v<D>) {
        const double whole = to_whole(to_float(value), mode);
        if (whole != whole) return 0;
        return static_cast<D>(
            std::min<double>(std::max<double>(whole, std::numeric_limits<D>::min()), std::numeric_limits<D>::max()));
    } else if constexpr (std::is_same_v<D, float>) {
        if constexpr (std::is_same_v<S, float>)
            return static_cast<float>(to_whole(value, mode));
        else if constexpr (std::is_integral_v<S>) {
            const float near = static_cast<float>(value);
            const double exact = value;
            if (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT || near == exact) return near;
            const float other = std::nextafterf(near, near < exact ? INFINITY : -INFINITY);
            const float low = std::min(near, other), high = std::max(near, other);
            const bool up = mode == RoundMode::CAST_CEIL || (mode == RoundMode::CAST_TRUNC && exact < 0) ||
                            (mode == RoundMode::CAST_ROUND &&
                             (high - exact < exact - low || (high - exact == exact - low && exact > 0)));
            return up ? high : low;
        } else
            return to_float(value);
    } else {
        if constexpr (std::is_integral_v<S>)
            return to_narrow<D>(value, mode);
        else
            return to_narrow<D>(to_float(value), mode);
    }
}

template <class D, class S>
void cast(Shape shape, const Walk& dst, const Walk& src, RoundMode mode) {
    static_assert(cast_modes<D, S>() != 0, "Cast does not support this pair of types on Atlas A2/A3");
    static const uint16_t op = name_op<D, S>("Cast");
    core().op = op;
    if (!(cast_modes<D, S>() >> int(mode) & 1))
        core().fail(text("RoundMode %d is not supported for this pair of types", int(mode)));
    if (std::is_same_v<S, int4b_t> && shape.lanes % 2)
        core().fail(text("%u elements of int4b_t: must be even", shape.lanes));
    using From = std::conditional_t<std::is_same_v<S, int4b_t>, int8_t, S>;
    if (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT) {  // the common modes have a loop of their own
        if constexpr (std::is_same_v<D, half> && std::is_same_v<From, int8_t>)
            return unary<false, D, S>(op, shape, dst, src, [](From x) { return static_cast<half>(float(x)); });
        else if constexpr (std::is_same_v<S, half> || std::is_same_v<S, bfloat16_t>) {
            if constexpr (std::is_same_v<D, float>)
                return unary<false, D, S>(op, shape, dst, src, [](From x) { return to_float(x); });
        } else if constexpr (std::is_same_v<S, float> && (std::is_same_v<D, half> || std::is_same_v<D, bfloat16_t>))
            return unary<false, D, S>(op, shape, dst, src, [](From x) { return nearest<D>(x); });
    }
    unary<false, D, S>(op, shape, dst, src, [mode](From x) { return cast_one<D, From>(x, mode); });
}
}  // namespace twin

namespace AscendC {

template <class T, class U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, uint32_t count) {
    twin::cast<T, U>(twin::by_count(count), twin::walk(dst, "the destination"), twin::walk(src, "the source"), mode);
}
template <class T, class U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, uint64_t mask,
          uint32_t repeatTime, const UnaryRepeatParams& p) {
    static_assert(isSetMask, "masks set outside of the call are not modelled");
    twin::cast<T, U>({uint32_t(mask), repeatTime, false},
                     twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),
                     twin::walk(src, "the source", p.srcBlkStride, p.srcRepStride), mode);
}

}  // namespace AscendC
