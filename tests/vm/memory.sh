# Nodes, huge pages and a memory limit of a real kernel: what machines for tests seldom have.
# machine: -smp 4 -m 1024 -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2-3 -numa dist,src=0,dst=1,val=20
# tests: pagemill-sys pagemill
echo 16 > /proc/sys/vm/nr_hugepages
# Its hints take the right to read a huge page away, and kernels before 6.6 leave such a page out of smaps.
echo 0 > /proc/sys/kernel/numa_balancing
# One at a time: huge pages are few.
export AT_ONCE=1
tests pagemill-sys memory:: numa::
tests pagemill memory::
