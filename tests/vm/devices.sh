# Devices that reach memory: QEMU's edu through VFIO, behind an emulated IOMMU, which Debian's kernel turns on by itself; and
# what other tests of devices need.
# machine: -smp 2 -m 1024
# machine: -device intel-iommu,intremap=on,caching-mode=on
# machine: -device edu,addr=03.0,dma_mask=0xffffffff
# modules: vfio-pci vfio_iommu_type1
# tests: pagemill
export PAGEMILL_TEST_EDU=0000:00:03.0
echo vfio-pci > /sys/bus/pci/devices/$PAGEMILL_TEST_EDU/driver_override
echo $PAGEMILL_TEST_EDU > /sys/bus/pci/drivers_probe
# One at a time: there is one device.
export AT_ONCE=1
tests pagemill device_vfio:: devices:: device_rings::
