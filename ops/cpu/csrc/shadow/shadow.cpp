#include "shadow/shadow.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <mutex>
#include <new>

#include "runtime/futex.h"

namespace umbra {
namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds(Clock::duration time) { return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(); }

int64_t now() { return nanoseconds(Clock::now().time_since_epoch()); }

}  // namespace

// Everything the coordinator may access. It is leaked with a coordinator that is abandoned.
struct ShadowPool::State {
    const Kernels& kernels;
    const std::chrono::nanoseconds timeout;
    std::unique_ptr<Pool> pool;                // made and used by the coordinator thread
    std::shared_ptr<ShadowWork> work;          // in flight; changed by the device's thread only
    uint32_t ticket = 0;                       // the work's number
    std::atomic<ShadowWork*> handed{nullptr};  // the same work, until the coordinator takes it
    std::mutex guard;                          // of `stopped` and of publishing
    bool stopped = false;
    std::atomic<bool> ended{false};
    alignas(64) std::atomic<uint32_t> submitted{0};  // counts works and the stop
    alignas(64) std::atomic<uint32_t> asleep{0};     // whether the coordinator is asleep
    alignas(64) std::atomic<uint32_t> done{0};       // number of the last work done
    std::atomic<uint32_t> news{0};                   // counts changes of `done` and `ended`

    State(const Kernels& kernels, double timeout) : kernels(kernels), timeout(static_cast<int64_t>(timeout * 1e9)) {}

    void publish() {  // the same ordering as in Pool::run
        submitted.fetch_add(1, std::memory_order_seq_cst);
        if (asleep.load(std::memory_order_seq_cst)) futex_wake(submitted);
    }

    void report() {
        news.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(news);
    }

    void coordinate() {
        Context context{*pool, kernels};
        for (uint32_t seen = 0;;) {
            for (int spin = 0; submitted.load(std::memory_order_acquire) == seen;) {
                if (++spin < kSpins) {
                    pause();
                    continue;
                }
                asleep.store(1, std::memory_order_seq_cst);
                if (submitted.load(std::memory_order_seq_cst) == seen) futex_wait(submitted, seen);
                asleep.store(0, std::memory_order_relaxed);
            }
            seen++;
            ShadowWork* const at = handed.exchange(nullptr, std::memory_order_relaxed);
            if (!at) break;
            at->began = now();
            at->compute(context);
            at->ended = now();
            Job* const job = at->finished();
            done.store(seen, std::memory_order_release);  // from here on the work may be freed
            report();
            if (job) job->done(job, 0);
        }
        pool.reset();
        ended.store(true, std::memory_order_release);
        report();
    }

    // Waits until `arrived()` is true; false if that takes longer than `timeout`.
    template <class F>
    bool await(F&& arrived) {
        for (int spin = 0; spin < kSpins; spin++) {
            if (arrived()) return true;
            pause();
        }
        const auto deadline = Clock::now() + timeout;
        for (;;) {
            const uint32_t seen = news.load(std::memory_order_seq_cst);
            if (arrived()) return true;
            const int64_t left = nanoseconds(deadline - Clock::now());
            if (left <= 0) return false;
            const timespec limit{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
            futex_wait(news, seen, &limit);
        }
    }
};

ShadowError ShadowWork::error(const std::string& what) const {
    return ShadowError("shadow experts: layer " + std::to_string(layer) + ", step " + std::to_string(*step) + ": " +
                       what);
}

ShadowPool::ShadowPool(const std::vector<Team>& teams, const Kernels& kernels, double timeout)
    : state_(std::make_unique<State>(kernels, timeout)), teams_(teams) {
    std::promise<void> started;
    std::future<void> start = started.get_future();
    try {
        coordinator_ = std::thread([this, state = state_.get(), started = std::move(started)]() mutable {
            try {
                state->pool = std::make_unique<Pool>(teams_);
            } catch (...) {
                return started.set_exception(std::current_exception());
            }
            started.set_value();
            state->coordinate();
        });
        start.get();
    } catch (const std::exception& error) {
        if (coordinator_.joinable()) coordinator_.join();
        if (dynamic_cast<const std::bad_alloc*>(&error)) throw;  // memory is another matter
        throw ShadowError(std::string("shadow experts: their threads cannot be started: ") + error.what());
    }
}

ShadowPool::~ShadowPool() {
    stop();
    if (state_->await([&] { return state_->ended.load(std::memory_order_acquire); })) {
        coordinator_.join();
    } else {
        coordinator_.detach();
        state_.release();
    }
}

void ShadowPool::stop() {
    std::lock_guard<std::mutex> lock(state_->guard);
    if (state_->stopped) return;
    state_->stopped = true;
    state_->publish();
}

std::vector<int> ShadowPool::split(int count) const {
    int threads = 0, before = 0;
    for (const Team& team : teams_) threads += team.threads;
    std::vector<int> firsts{0};
    for (const Team& team : teams_) {
        before += team.threads;
        firsts.push_back(static_cast<int>(int64_t{count} * before / threads));
    }
    return firsts;
}

bool ShadowPool::submit(const std::shared_ptr<ShadowWork>& work) {
    State& state = *state_;
    std::shared_ptr<ShadowWork> last = work;  // released after the lock: what it keeps may be a Python object
    std::lock_guard<std::mutex> lock(state.guard);
    if (state.stopped) return false;
    state.work.swap(last);
    state.ticket = state.submitted.load(std::memory_order_relaxed) + 1;
    state.handed.store(work.get(), std::memory_order_relaxed);
    state.publish();
    return true;
}

bool ShadowPool::idle() const { return state_->done.load(std::memory_order_acquire) == state_->ticket; }

void ShadowPool::wait() {
    State& state = *state_;
    if (!state.work) return;
    if (!state.await([&] { return idle(); })) {
        char seconds[32];
        std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(state.timeout.count()) / 1e9);
        throw state.work->error(std::string("not done after ") + seconds + " s");
    }
    state.work.reset();
}

void Submit::run(Context&) const {
    pool->wait();
    work->pending = false;
    const MoeRows& rows = work->rows;
    auto* const resident = const_cast<int64_t*>(rows.elsewhere);
    const auto each_pair = [&](auto&& with_expert) {
        for (int64_t a = 0; a < rows.tokens * rows.k; a++) {
            const int64_t e = rows.ids[a] - rows.first_expert;
            if (e >= 0 && e < rows.experts) with_expert(e);
        }
    };
    if (arrived)
        each_pair([&](int64_t e) {
            if (!resident[e]) resident[e] = arrived[e].load(std::memory_order_acquire);
        });
    each_pair([&](int64_t e) {
        if (!resident[e] && !rows.address[e])
            throw work->error("expert " + std::to_string(e) + " is neither resident nor in the shadow store");
        counts[e]++;
        *hits += resident[e] != 0;
    });
    if (!rows.sort()) return;
    if (!pool->submit(work)) throw work->error("the shadow pool was stopped");
    work->pending = true;
}

void Join::run(Context& context) const {
    std::fill(times, times + 4, 0);
    if (work->pending) {
        times[2] = now();
        pool->wait();
        work->pending = false;
        times[0] = work->began;
        times[1] = work->ended;
        times[3] = now();
    }
    sum.run(context);
}

}  // namespace umbra
