# What matters on aarch64, whose memory model and restartable sequences are others than those of x86-64: the tests of lists,
# drains, signals, forks and races, and stress on both backends. All tests are in aarch64-whole.
# arch: aarch64
# machine: -smp 2 -m 3072
# tests: pagemill-os.unit pagemill-os pagemill.unit pagemill
# crate: pagemill-cli
echo 16 > /proc/sys/vm/nr_hugepages
tests pagemill-os.unit
tests pagemill-os
tests pagemill.unit
# Less those that take up to a minute each: some count pages or waiters, which no processor does otherwise, some wait for two
# threads to meet, and stress has worlds that share an allocator too.
tests pagemill accounts:: devices:: drain:: fork_and_locks:: fork_short:: forms:: list_policy:: mempool:: misuse:: \
    races:: refused:: signals:: waits:: waits_and_lists:: \
    --skip lists_hold_at_most_an_eighth_of_a_small_zone --skip every_form_delivers_blocks_of_every_order \
    --skip parent_and_child_build_allocators_across_forks --skip threads_that_exit_or_change_cpu_lose_no_page --skip quarantined_frames_stay_quarantined_in_a_child \
    --skip a_thousand_waiters_of_one_kind_are_served_in_order_of_arrival --skip a_concurrent_double_free_is_detected
PROPTEST_CASES=20 tests pagemill model:: --skip large_arenas --skip worlds_that_share_an_allocator
# Few threads and pages: four threads beside a child of stress use up what the emulation has.
for backend in rseq portable; do
    PAGEMILL_BACKEND=$backend check pagemill-cli stress-$backend \
        pagemill stress --seconds 5 --seed 1 --threads 2 --pages 20011
done
