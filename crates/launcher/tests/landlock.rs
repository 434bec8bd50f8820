//! The access rights that plans are made of are those that the kernel's wrapper uses.

use stockade_policy::plan::access as plan;
use stockade_sys::landlock::access as kernel;

#[test]
fn plans_and_system_calls_mean_the_same_rights() {
    for abi in 0..10 {
        assert_eq!(plan::handled(abi), kernel::handled(abi), "ABI {abi}");
    }
    let pairs = [
        (plan::EXECUTE, kernel::EXECUTE),
        (plan::WRITE_FILE, kernel::WRITE_FILE),
        (plan::READ_FILE, kernel::READ_FILE),
        (plan::READ_DIR, kernel::READ_DIR),
        (plan::MAKE_CHAR, kernel::MAKE_CHAR),
        (plan::MAKE_SOCK, kernel::MAKE_SOCK),
        (plan::MAKE_FIFO, kernel::MAKE_FIFO),
        (plan::MAKE_BLOCK, kernel::MAKE_BLOCK),
        (plan::REFER, kernel::REFER),
        (plan::IOCTL_DEV, kernel::IOCTL_DEV),
    ];
    assert!(pairs.iter().all(|(plan, kernel)| plan == kernel));
}
