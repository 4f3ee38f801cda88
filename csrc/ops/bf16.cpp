#include "ops/functions.h"

#include "isa/current.h"

namespace octavo::OCTAVO_ISA {

void bf16_to_f32(const uint16_t* source, float* target, size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(target + i, load_bf16(source + i));
    if (i == count) return;
    uint16_t rest[kLanes] = {};
    float converted[kLanes];
    memcpy(rest, source + i, (count - i) * sizeof *rest);
    store(converted, load_bf16(rest));
    memcpy(target + i, converted, (count - i) * sizeof *converted);
}

void f32_to_bf16(const float* source, uint16_t* target, size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_bf16(target + i, load(source + i));
    if (i == count) return;
    float rest[kLanes] = {};
    uint16_t converted[kLanes];
    memcpy(rest, source + i, (count - i) * sizeof *rest);
    store_bf16(converted, load(rest));
    memcpy(target + i, converted, (count - i) * sizeof *converted);
}

}  // namespace octavo::OCTAVO_ISA
