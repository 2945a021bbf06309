//! Operations that the fuzzer chooses, against the reference model: the same alphabet as in the property tests and
//! `pagemill stress`. The first byte says how large the arena is, or that a machine of several nodes follows; there
//! acquisitions may fail.
#![no_main]

use arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use pagemill::{Allocator, Backend};
use pagemill_model::{Failing, Machine, Op, Raw, World, fake_cpu, set_fake_cpu};

/// Sizes around those where paths part.
const SIZES: [usize; 8] = [1, 2, 100, 512, 600, 1500, 4096, 20_001];
const CPUS: usize = 3;
/// More operations would find nothing that these do not, and later.
const OPS: usize = 300;

/// Bits of the first byte.
const RSEQ: u8 = 8;
const MACHINE: u8 = 16;
const FAILING: u8 = 32;

fn raw(bytes: &mut Unstructured<'_>) -> Option<Raw> {
    if bytes.len() < size_of::<u8>() + 4 * size_of::<u32>() {
        return None; // Past its end an input would go on with zeros.
    }
    let (kind, a, b, c, d) = bytes.arbitrary().ok()?;
    Some(Raw { kind, a, b, c, d })
}

/// An arena, and who may close it at the end; or a machine, which its world closes.
fn world(choice: u8, bytes: &mut Unstructured<'_>) -> Option<(World, Option<Allocator>)> {
    set_fake_cpu(0);
    if choice & MACHINE != 0 {
        let failing = if choice & FAILING != 0 { Failing::Sometimes(choice >> 6, 1) } else { Failing::Never };
        let machine = Machine::decode(raw(bytes)?, CPUS).failing(failing);
        let built = machine.build(Allocator::builder().cpus(CPUS, fake_cpu));
        let built = built.unwrap_or_else(|error| panic!("{machine:?} could not be made: {error}"));
        return Some((World::over(built, |cpu| set_fake_cpu(cpu % CPUS), fake_cpu), None));
    }
    let builder = Allocator::builder().pages(SIZES[usize::from(choice) % SIZES.len()]).huge_pages(false);
    // Restartable sequences where there are any: a sanitizer does not see into them, but sees what they hand out.
    let builder = match choice & RSEQ != 0 && pagemill::self_test().is_ok() {
        true => builder.backend(Backend::Rseq),
        false => builder.cpus(CPUS, fake_cpu),
    };
    let allocator = builder.build().unwrap_or_else(|error| panic!("no allocator could be made: {error}"));
    Some((World::alone(allocator.clone(), set_fake_cpu), Some(allocator)))
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = Unstructured::new(bytes);
    let choice = bytes.arbitrary::<u8>().unwrap_or(0);
    let Some((mut world, allocator)) = world(choice, &mut bytes) else { return };
    for i in 0..OPS {
        let Some(raw) = raw(&mut bytes) else { break };
        let op = Op::decode(raw);
        world.apply(op).unwrap_or_else(|failure| panic!("operation {i}, {op:?}: {failure}"));
    }
    world.finish().unwrap_or_else(|failure| panic!("at the end: {failure}"));
    if let Some(allocator) = allocator {
        allocator.close().unwrap_or_else(|still_out| panic!("at the end: {still_out}"));
    }
});
