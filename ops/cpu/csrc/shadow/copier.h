// Copies experts' blocks into expert slots, one after another, on its own thread while steps run.
//
// Ordering. A copy's bytes are written before the slot's address is stored to `arrived` (release), from where Submit
// takes it over (acquire), and that before `finished_` counts the copy (release); `done` reads the counter (acquire). So
// no step reads a slot before it is complete. No slot is overwritten while in use: before it becomes the target of a
// copy, its address is removed from `arrived` and the device's table, between two replays and once its copy is done, by
// the thread that submits the copy.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace umbra {

// A contiguous run of bytes of a copy: offsets from the target's and the source's address.
struct Piece {
    int64_t to, from, bytes;
};

class Copier {
public:
    // The thread is pinned to `cpus`. If empty it inherits the caller's CPUs, and the caller may be pinned to a few.
    explicit Copier(const std::vector<int>& cpus = {});
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // `submit` queues a copy and returns its ticket. `done` says without blocking whether it is finished; `wait` blocks
    // until it is. Once the copier is stopped they throw, except for finished copies, and no more bytes are written.
    // A finished copy stores `to` to `arrived`, unless that is null.
    uint64_t submit(void* to, const void* from, std::vector<Piece> pieces, std::atomic<int64_t>* arrived = nullptr);
    bool done(uint64_t ticket) const;
    void wait(uint64_t ticket);

    // Ends the thread after the copy in flight; queued copies are dropped.
    void stop();

private:
    struct Copy {
        void* to;
        const void* from;
        std::vector<Piece> pieces;
        std::atomic<int64_t>* arrived;
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
