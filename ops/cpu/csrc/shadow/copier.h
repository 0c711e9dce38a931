// Copies experts' blocks into slots on a thread of its own, one after another, while steps run.
//
// Ordering. A copy's bytes are written before its number is stored to `finished_` (release); `done` reads it (acquire).
// Who sees a copy done writes the slot's address into the device's table, between two replays; the next replay runs on
// that same thread. So no step reads a slot before it is whole. Nor is one written while in use: a slot is a copy's
// target only after a table write, between replays too, that took its last address away.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace umbra {

// Of something that lies in pieces in one place and is whole in another: bytes from each one's address.
struct Piece {
    int64_t to, from, bytes;
};

class Copier {
public:
    // `cpus` that its thread stays on; empty: the caller's. It inherits those otherwise, and the caller may be pinned.
    explicit Copier(const std::vector<int>& cpus = {});
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // A ticket; `done` without blocking whether its copy is, `wait` until it is. All throw once the copier was stopped,
    // but for copies that are done; before they throw nothing is written any more.
    uint64_t submit(void* to, const void* from, std::vector<Piece> pieces);
    bool done(uint64_t ticket) const;
    void wait(uint64_t ticket);

    // Ends after the copy that is being made; those behind it are not made.
    void stop();

private:
    struct Copy {
        void* to;
        const void* from;
        std::vector<Piece> pieces;
    };
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Copy> queue_;
    uint64_t submitted_ = 0;
    std::atomic<uint64_t> finished_{0};
    bool stopped_ = false;
    std::atomic<bool> ended_{false};
    std::thread thread_;
};

}  // namespace umbra
