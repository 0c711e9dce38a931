// Shadow experts: a second pool computes the experts that are not resident, from blocks of the shadow store, while the
// main pool ("the device") computes the resident ones. On the tape a layer's mixture is Submit, MoeRows, Join.
//
// Data access. Only the device's thread reads and writes the tables of addresses, `ids`, the counters and the step
// number. Submit takes over the addresses of copies that have arrived (copier.h) and sorts the pairs on that thread
// before it publishes the work, so the shadow pool never reads a table that changes, and both pools agree on which
// experts are resident for this layer in this step. The shadow pool reads x, the sorted pairs and the store (written
// once, before the first step), and writes the rows of its pairs and its own scratch memory. The device writes the rows
// of the other pairs. The store's table never changes.
//
// Ordering. `submit` writes the work and publishes it by incrementing `submitted`; the coordinator, thread 0 of the
// shadow pool, sees it by an acquire load. The coordinator reports by a store to `done` and a release increment of
// `news`; `wait` returns after an acquire load that sees it, so Join sees the rows and everything written before. An
// increment without a work means stop; after it `submit` publishes nothing, and a work published before it is still
// completed. At most one work is in flight: Submit waits for one that an interrupted step left behind before it writes
// anything that work reads. So tables may be written whenever no op runs, between two replays: the thread that reads
// them is the one that writes.
//
// No hangs. Waiting has a deadline, after which it throws; waiting for a stopped pool throws at once. A work owns
// everything it may access (`keep`). A pool that does not end in time is abandoned: its thread is detached, and
// everything that the thread may access is never freed.
//
// A step allocates nothing: works are made at capture and passed by reference.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/ops.h"
#include "shadow/job.h"

namespace umbra {

struct ShadowError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The shadow pool's part of one layer's mixture; worker.h has the form for a bridge's jobs.
struct ShadowWork {
    MoeRows rows;  // of the experts that are not resident: `elsewhere` is the device's table
    int64_t layer;
    const int64_t* step;           // points to the step's number, for errors
    std::shared_ptr<void> keep;    // owns the memory that the work reads and writes
    bool pending = false;          // in flight: submitted and not yet waited for
    int64_t began = 0, ended = 0;  // when the pool computed it: nanoseconds of the steady clock

    ShadowWork(const MoeRows& rows, int64_t layer, const int64_t* step, std::shared_ptr<void> keep)
        : rows(rows), layer(layer), step(step), keep(std::move(keep)) {}
    virtual ~ShadowWork() = default;
    virtual void compute(Context& context) { rows.compute(context); }
    // The bridge's job, if any, to report as done once the next work may be submitted.
    virtual Job* finished() { return nullptr; }

    ShadowError error(const std::string& what) const;
};

class ShadowPool {
public:
    // `timeout`: seconds that a wait, and the end of the pool, may take at most.
    ShadowPool(const std::vector<Team>& teams, const Kernels& kernels, double timeout);
    ~ShadowPool();
    ShadowPool(const ShadowPool&) = delete;
    ShadowPool& operator=(const ShadowPool&) = delete;

    // Called by one thread at a time. `submit` returns without waiting, false if the pool was stopped; `wait` blocks
    // until the submitted work, if any, is done; `idle` says whether it is done.
    bool submit(const std::shared_ptr<ShadowWork>& work);
    void wait();
    bool idle() const;

    // Ends the pool after the work in flight, if any. May be called by any thread.
    void stop();

    // Where each team's part of `count` items begins, and the end of the last part.
    std::vector<int> split(int count) const;

private:
    struct State;
    std::unique_ptr<State> state_;
    std::vector<Team> teams_;
    std::thread coordinator_;
};

// Makes used experts resident whose copies have arrived, counts the routing and submits the layer's work, if any.
struct Submit {
    std::shared_ptr<ShadowPool> pool;
    std::shared_ptr<ShadowWork> work;
    int64_t* counts;                      // (experts) += 1 for each pair
    int64_t* hits;                        // += 1 for each pair whose expert is resident
    const std::atomic<int64_t>* arrived;  // (experts) where copies have arrived; 0: none; or null
    void run(Context&) const;
};

// Waits for the submitted work and adds up all rows.
struct Join {
    std::shared_ptr<ShadowPool> pool;
    std::shared_ptr<ShadowWork> work;
    AddRows sum;
    int64_t* times;  // (4) ns: pool began, pool ended, Join began to wait, Join went on; 0: no work was needed
    void run(Context&) const;
};

}  // namespace umbra
