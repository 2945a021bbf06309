# All of the library's tests on two nodes; nodes has those of them that do not take minutes.
# tier: long
# minutes: 60
# machine: -smp 4 -m 1024 -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2-3 -numa dist,src=0,dst=1,val=20
# tests: pagemill
tests pagemill
