# An NVMe drive driven by `pagemill nvme`, past the kernel's driver, behind an emulated IOMMU: what the one wrote the other
# reads, whole. And what goes wrong: each in words, and nothing lost.
# machine: -smp 2 -m 1024
# machine: -device intel-iommu,intremap=on,caching-mode=on
# machine: -device nvme,serial=pagemill,drive=data,max_ioqpairs=8,mdts=10 -device nvme,serial=slow,drive=slow
# machine: -device nvme,serial=other,drive=other
# kernel: intel_iommu=on
# disks: data=16M slow=8M,throttling.iops-total=2 other=16M
# modules: vfio-pci vfio_iommu_type1 nvme ext4 crc32c_generic
# programs: cmp mkfs.ext4
# examples: pagemill-nvme/load pagemill-nvme/mirror
# crate: pagemill-cli
set -u -o pipefail
drive=0000:00:02.0
slow=0000:00:03.0
other=0000:00:04.0

fails() { echo "vm: $*"; exit 1; }
# said WORDS COMMAND…: it fails, and says these words.
said() {
    words=$1
    shift
    if "$@" > said.txt 2>&1; then fails "this did not fail: $*"; fi
    cat said.txt
    grep -qF -- "$words" said.txt || fails "it did not say '$words': $*"
    [ "$(wc -l < said.txt)" = 1 ] || fails "that is not one line: $*"
}
kernels() {
    pagemill nvme unbind $drive
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
}
ours() { pagemill nvme bind $drive; }
# The bench in the background says so when the drive has its queues. `notices` was emptied before it began: the shell
# that starts it may open the file later, with what an earlier one said still in it.
begun() {
    until grep -q 'random requests' notices; do
        kill -0 $bench || fails 'the bench did not begin'
        sleep 0.1
    done
}
random() { dd if=/dev/urandom of="$1" bs=1M count=16 2> /dev/null; }

echo '== what is in use, or no drive, is left alone'
said 'bind it first' pagemill nvme identify $drive
said 'is no NVMe controller' pagemill nvme bind 0000:00:1f.0
said 'there is no PCI device' pagemill nvme bind 0000:00:1e.0
mkfs.ext4 -q /dev/nvme0n1
mount /dev/nvme0n1 /mnt
said '/dev/nvme0n1 is mounted on /mnt; unmount it' pagemill nvme bind $drive
umount /mnt
mkswap /dev/nvme0n1 > /dev/null
swapon /dev/nvme0n1
said '/dev/nvme0n1 is swap space' pagemill nvme bind $drive
swapoff /dev/nvme0n1
[ -b /dev/nvme0n1 ] || fails 'the drive was taken though it was in use'

echo '== what the kernel wrote, Pagemill reads'
random written
dd if=written of=/dev/nvme0n1 bs=1M conv=fsync 2> /dev/null
ours
pagemill nvme identify $drive
seed=0
for how in '--queues 1' '--queues 1 --poll' '--queues 4' '--queues 4 --poll'; do
    seed=$((seed + 1))
    pagemill nvme read $drive --bytes 16M --random $seed $how --to read --force
    /bin/cmp written read || fails "read otherwise than written: $how"
done
pagemill nvme read $drive --bytes 16M --to - | /bin/cmp - written
pagemill nvme read $drive --lba 12345 --blocks 7 --to - > seven
dd if=written bs=512 skip=12345 count=7 2> /dev/null | /bin/cmp - seven

echo '== what Pagemill wrote, the kernel reads'
seed=0
for how in '--queues 1' '--queues 1 --poll' '--queues 4' '--queues 4 --poll'; do
    seed=$((seed + 1))
    random written
    pagemill nvme write $drive --random $seed $how --from written
    kernels
    /bin/cmp written /dev/nvme0n1 || fails "written otherwise than meant: $how"
    ours
done

echo '== blocks without data, and the drive'\''s health'
random written
pagemill nvme write $drive --from written
pagemill nvme zero $drive --lba 100 --blocks 3000
dd if=/dev/zero of=written bs=512 seek=100 count=3000 conv=notrunc 2> /dev/null
pagemill nvme discard $drive --lba 30720 --bytes 1M
pagemill nvme smart $drive
pagemill nvme smart $drive --json | grep -q '"warnings":\[\],"critical_warning":0,"temperature_c":50,' || fails 'its health differs'
kernels
# What is discarded may have any contents.
dd if=/dev/nvme0n1 bs=512 count=30720 2> /dev/null > start
dd if=written bs=512 count=30720 2> /dev/null | /bin/cmp - start || fails 'other blocks were zeroed or discarded'
ours
pagemill nvme write $drive --from written

echo '== two drives, two threads each: a load, and a copy from the one to the other'
pagemill nvme bind $other
for how in '' '--no-shadows' '--poll' '--poll --no-shadows'; do
    load $drive $other --seconds 2 $how | tee figures
    [ "$(grep -c 'queue [12]: [1-9]' figures)" = 4 ] || fails "not all queues did something: $how"
    grep -q '^0 aborts, 0 resets' figures || fails "something was late: $how"
done
mirror $drive $other
pagemill nvme unbind $other
disk=
until [ -n "$disk" ] && [ -b /dev/$disk ]; do
    sleep 0.1
    disk=$(ls /sys/bus/pci/devices/$other/nvme/*/ | grep '^nvme[0-9]*n1$' || true)
done
/bin/cmp written /dev/$disk || fails 'the copy differs'
# So that the kernel's first disk is the first drive again.
pagemill nvme bind $other

echo '== what is asked wrongly is told in words'
said '8 blocks from 32766 on: namespace 1 has 32768' pagemill nvme read $drive --lba 32766 --blocks 8 --to none
said '8 blocks from 32766 on: namespace 1 has 32768' pagemill nvme write $drive --lba 32766 --blocks 8 --from written
pagemill nvme read $drive --bytes 16M --to read --force
/bin/cmp written read || fails 'a write that was refused wrote something'
said 'there is no namespace 2' pagemill nvme read $drive --namespace 2 --blocks 8 --to none
said 'this controller grants 8' pagemill nvme bench $drive --queues 9
said 'say --overwrite' pagemill nvme bench $drive --writes 1
[ ! -e none ] || fails 'a read that failed left a file'

echo '== a controller that is reset under load'
random written
pagemill nvme write $drive --random 9 --queues 4 --depth 4 --reset-every 5 --from written > figures 2> notices
cat figures
tail -n 1 notices
grep -q ' [1-9][0-9]* of them again; .* [1-9][0-9]* resets' figures || fails 'nothing was reset under load'
kernels
/bin/cmp written /dev/nvme0n1 || fails 'something was lost in a reset'
ours
# On the slow drive, whose commands wait in it: QEMU 7.2 ends if a reset comes just as it fetches some.
pagemill nvme bind $slow
: > notices
pagemill nvme bench $slow --seconds 2 --depth 4 --batch 1 2> notices > figures &
bench=$!
begun
sleep 0.5
echo 1 > /sys/bus/pci/devices/$slow/reset
wait $bench || fails 'a reset from elsewhere ended it'
cat figures notices
grep -q 'somebody else has reset the controller' notices || fails 'it did not see the reset'

echo '== a drive that does not answer in time'
pagemill nvme read $slow --blocks 128 --transfer 4K --timeout 0.2 --to late 2> notices || echo "it ended with $?"
tail -n 2 notices
grep -q 'took longer than 0.2 s: aborting it' notices || fails 'nothing was aborted'
grep -q 'neither by itself nor by an Abort: resetting' notices || fails 'nothing was reset'
pagemill nvme identify $slow > /dev/null

echo '== a process that is killed, or told to end'
begin() {
    : > notices
    pagemill nvme bench $drive --seconds 60 --queues 4 --depth 1 --size 1M "$@" 2> notices &
    bench=$!
    begun
}
begin
said 'a process has its group' pagemill nvme unbind $drive
said 'another process has it' pagemill nvme identify $drive
kill -9 $bench
wait $bench || echo "killed: it ended with $?"
pagemill nvme read $drive --bytes 16M --queues 2 --to read --force
/bin/cmp written read || fails 'something else is there after a kill'
begin --poll
kill -TERM $bench
code=0
wait $bench || code=$?
cat notices
[ $code = 143 ] || fails "it ended with $code by SIGTERM"
grep -q 'SIGTERM came; the drive was shut down in order' notices || fails 'it said something else'

echo '== memory that runs short'
pagemill nvme read $drive --bytes 16M --queues 4 --memory 2 --random 3 --to read --force 2> notices
cat notices
grep -q 'memory was short' notices || fails 'there was enough'
/bin/cmp written read || fails 'something was lost for want of memory'
PAGEMILL_FAIL=p=0.3 pagemill nvme read $drive --bytes 16M --random 4 --to read --force 2> notices
cat notices
/bin/cmp written read || fails 'something was lost in acquisitions that failed'
said 'give more with --memory' pagemill nvme read $drive --blocks 8 --queues 8 --depth 2047 --memory 1 --to none

echo '== without root'
printf 'root::0:0::/:/bin/sh\nnobody::99:99::/:/bin/sh\n' > /etc/passwd
said 'not permitted; run it as root' su nobody -c "pagemill nvme identify $drive"
said 'run it as root' su nobody -c "pagemill nvme unbind $drive"
kernels
said 'run it as root' su nobody -c "pagemill nvme bind $drive"
/bin/cmp written /dev/nvme0n1 || fails 'the drive has something else in the end'
