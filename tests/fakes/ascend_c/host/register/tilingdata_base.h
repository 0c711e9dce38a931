// Tiling structs as the host fills them: set_ and get_ of every field, laid out in order, each at a multiple of its size.
#pragma once
#include <cstring>

#include "gert.h"

namespace optiling {
class TilingDef {
  public:
    size_t GetDataSize() const { return (bytes.size() + 7) / 8 * 8; }
    void SaveToBuffer(void *to, size_t capacity) const {
        if (capacity >= bytes.size())
            std::memcpy(to, bytes.data(), bytes.size());
    }

  protected:
    size_t place(size_t size) {
        const size_t at = (bytes.size() + size - 1) / size * size;
        bytes.resize(at + size);
        return at;
    }
    std::vector<uint8_t> bytes;
};
} // namespace optiling

#define BEGIN_TILING_DATA_DEF(name)                                                                                    \
    class name : public ::optiling::TilingDef {                                                                        \
      public:
#define TILING_DATA_FIELD_DEF(type, name)                                                                              \
    void set_##name(type value) { std::memcpy(&bytes[at_##name], &value, sizeof value); }                              \
    type get_##name() const {                                                                                          \
        type value;                                                                                                    \
        std::memcpy(&value, &bytes[at_##name], sizeof value);                                                          \
        return value;                                                                                                  \
    }                                                                                                                  \
    size_t at_##name = place(sizeof(type))
#define END_TILING_DATA_DEF }
#define REGISTER_TILING_DATA_CLASS(op, name) // only the last of a chain of CANN's generators reads it
