/* A module that includes what is not here. */
#include <linux/blkdev.h>
#include <linux/module.h>
