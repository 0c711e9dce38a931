// The shapes of AMX's tiles, on the CPU (tiles.h) and on its twin.
#pragma once

#include <cstdint>

namespace umbra {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
};

inline void configure(const TileShapes& shapes);
inline void release_tiles();

// The shapes of a thread's tiles, from here to the end of the scope.
class Tiles {
public:
    explicit Tiles(const TileShapes& shapes) { configure(shapes); }
    ~Tiles() { release_tiles(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

}  // namespace umbra
