//! `pagemill nvme bind` and `unbind`.
use clap::Args;

use crate::Error;
use crate::bind;
use crate::pci::{Address, Function, System};

/// Take a drive from the kernel's driver and give it to vfio-pci
///
/// Refuses a drive that is mounted, swapped to, held by another device, or whose
/// IOMMU group has others: nothing has changed then.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct BindArgs {
    /// The drive's PCI address, as 0000:01:00.0
    #[arg(value_name = "DEV")]
    address: Address,
}

/// Give a drive back to the kernel's driver
#[derive(Args, Debug)]
pub(super) struct UnbindArgs {
    /// The drive's PCI address, as 0000:01:00.0
    #[arg(value_name = "DEV")]
    address: Address,
}

pub(super) fn bind(args: &BindArgs) -> Result<String, Error> {
    let system = System::this();
    Ok(bind::bind(&system, &Function::open(&system, args.address)?)? + "\n")
}

pub(super) fn unbind(args: &UnbindArgs) -> Result<String, Error> {
    let system = System::this();
    Ok(bind::unbind(&system, &Function::open(&system, args.address)?)? + "\n")
}
