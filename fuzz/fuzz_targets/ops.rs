//! Operations that the fuzzer chooses, against the reference model: the same alphabet as in the property tests and
//! `pagemill stress`. The first byte says how large the arena is.
#![no_main]

use arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use pagemill::{Allocator, Backend};
use pagemill_model::{Op, Raw, World, fake_cpu, set_fake_cpu};

/// Sizes around those where paths part.
const SIZES: [usize; 8] = [1, 2, 100, 512, 600, 1500, 4096, 20_001];
const CPUS: usize = 3;
/// More operations would find nothing that these do not, and later.
const OPS: usize = 300;

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = Unstructured::new(bytes);
    let choice = bytes.arbitrary::<u8>().unwrap_or(0);
    let builder = Allocator::builder().pages(SIZES[usize::from(choice) % SIZES.len()]).huge_pages(false);
    // Restartable sequences where there are any: a sanitizer does not see into them, but sees what they hand out.
    let builder = match choice & 8 != 0 && pagemill::self_test().is_ok() {
        true => builder.backend(Backend::Rseq),
        false => builder.cpus(CPUS, fake_cpu),
    };
    let Ok(allocator) = builder.build() else { panic!("no allocator could be made") };
    set_fake_cpu(0);
    let mut world = World::alone(allocator.clone(), set_fake_cpu);
    for i in 0..OPS {
        if bytes.len() < size_of::<u8>() + 3 * size_of::<u32>() {
            break; // Past its end an input would go on with zeros.
        }
        let Ok((kind, a, b, c)) = bytes.arbitrary::<(u8, u32, u32, u32)>() else { break };
        let op = Op::decode(Raw { kind, a, b, c });
        world.apply(op).unwrap_or_else(|failure| panic!("operation {i}, {op:?}: {failure}"));
    }
    world.finish().unwrap_or_else(|failure| panic!("at the end: {failure}"));
    allocator.close().unwrap_or_else(|still_out| panic!("at the end: {still_out}"));
});
