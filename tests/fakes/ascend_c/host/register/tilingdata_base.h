// Tiling structs as the host fills them: every field has set_ and get_, and fields are laid out in order, each at a
// multiple of its size.
#pragma once
#include <cstring>

#include "gert.h"

namespace optiling {
class TilingDef {
public:
    size_t GetDataSize() const { return (bytes.size() + 7) / 8 * 8; }
    void SaveToBuffer(void* to, size_t capacity) const {
        if (capacity >= bytes.size()) std::memcpy(to, bytes.data(), bytes.size());
    }

protected:
    size_t place(size_t size) {
        const size_t at = (bytes.size() + size - 1) / size * size;
        bytes.resize(at + size);
        return at;
    }
    std::vector<uint8_t> bytes;
};
}  // namespace optiling

#define BEGIN_TILING_DATA_DEF(name)             \
    class name : public ::optiling::TilingDef { \
    public:
#define TILING_DATA_FIELD_DEF(type, name)                                                 \
    void set_##name(type value) { std::memcpy(&bytes[at_##name], &value, sizeof value); } \
    type get_##name() const {                                                             \
        type value;                                                                       \
        std::memcpy(&value, &bytes[at_##name], sizeof value);                             \
        return value;                                                                     \
    }                                                                                     \
    size_t at_##name = place(sizeof(type))
#define END_TILING_DATA_DEF }
#define REGISTER_TILING_DATA_CLASS(op, name)  // read only by a later one of CANN's generators
