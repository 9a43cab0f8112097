// Run numbered jobs on a few threads. The first exception stops the rest and is rethrown.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace ww {

// make_worker() is called once per thread and gives a callable that takes a job number.
template <class MakeWorker>
void run_jobs(size_t n_jobs, size_t n_threads, MakeWorker make_worker) {
    std::atomic<size_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_lock;
    const auto work = [&] {
        try {
            auto worker = make_worker();
            for (size_t job; (job = next.fetch_add(1)) < n_jobs;) worker(job);
        } catch (...) {
            next.store(n_jobs);
            const std::lock_guard<std::mutex> guard(failure_lock);
            if (!failure) failure = std::current_exception();
        }
    };
    if (n_threads > n_jobs) n_threads = n_jobs;
    std::vector<std::thread> threads;
    try {
        for (size_t t = 1; t < n_threads; t++) threads.emplace_back(work);
    } catch (const std::system_error&) {
        // The system gives no more threads: those there are do all the work.
    }
    work();
    for (auto& thread : threads) thread.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace ww
