# Nodes, huge pages and a memory limit of a real kernel: what machines for tests seldom have. Then the library's own tests on two
# nodes, where an allocator that says nothing has an arena on each.
# machine: -smp 4 -m 1024 -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2-3 -numa dist,src=0,dst=1,val=20
# tests: pagemill-os pagemill
echo 16 > /proc/sys/vm/nr_hugepages
# Its hints take the right to read a huge page away, and kernels before 6.6 leave such a page out of smaps.
balancing=$(cat /proc/sys/kernel/numa_balancing)
echo 0 > /proc/sys/kernel/numa_balancing
# One at a time: huge pages are few.
AT_ONCE=1 tests pagemill-os memory:: numa::
AT_ONCE=1 tests pagemill memory::
echo 0 > /proc/sys/vm/nr_hugepages
echo "$balancing" > /proc/sys/kernel/numa_balancing
# Less those that emulation needs half a minute to minutes for: they are in nodes-whole.
tests pagemill forms:: misuse:: close:: give_back:: pressure:: waits:: nodes:: --skip model_nodes:: \
    --skip faults_at_every_acquisition_lose_no_page --skip give_back_and_retire_race_with_allocation \
    --skip a_thousand_waiters_of_one_kind_are_served_in_order_of_arrival --skip a_concurrent_double_free_is_detected
