//! The layers that a build for tests can leave out, one at a time, by name.
//!
//! Only names: the code that sets a layer up defines it. A program that is built without the
//! feature `ablation` cannot leave a layer out.

macro_rules! layers {
    ($($(#[doc = $text:literal])* $layer:ident $name:literal;)*) => {
        /// A layer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Layer {
            $($(#[doc = $text])* $layer,)*
        }

        impl Layer {
            /// All of them.
            pub const ALL: &[Layer] = &[$(Layer::$layer),*];

            /// The name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Layer::$layer => $name,)*
                }
            }
        }
    };
}

layers! {
    /// Both user namespaces.
    UserNamespaces "user-namespaces";
    /// The inner one.
    InnerUserNamespace "inner-user-namespace";
    /// The counts of the outer one.
    NamespaceCounts "namespace-counts";
    /// The host's root is detached after the pivot.
    DetachedRoot "detached-root";
    /// The sandbox's root is read-only.
    ReadOnlyRoot "read-only-root";
    /// `/proc` is read-only.
    ReadOnlyProc "read-only-proc";
    /// What of `/proc` is covered.
    ProcMasks "proc-masks";
    /// Sizes of the tmpfs that can be written to.
    TmpfsSizes "tmpfs-sizes";
    /// nosuid and nodev on scratch.
    ScratchFlags "scratch-flags";
    /// What the policy hides and protects in scratch.
    ScratchRules "scratch-rules";
    /// The watch over a host scratch's growth.
    ScratchCount "scratch-count";
    /// The idmap of a host scratch.
    Idmap "idmap";
    /// The PID namespace.
    PidNamespace "pid-namespace";
    /// The network namespace.
    NetworkNamespace "network-namespace";
    /// The UTS namespace.
    UtsNamespace "uts-namespace";
    /// The IPC namespace.
    IpcNamespace "ipc-namespace";
    /// The cgroup namespace.
    CgroupNamespace "cgroup-namespace";
    /// A fresh session keyring.
    SessionKeyring "session-keyring";
    /// Capabilities, bounding set and securebits.
    Capabilities "capabilities";
    /// no_new_privs.
    NoNewPrivs "no-new-privs";
    /// The system call filter.
    Seccomp "seccomp";
    /// Landlock of the whole sandbox.
    Landlock "landlock";
    /// Landlock of the payload.
    PayloadLandlock "payload-landlock";
    /// The limits of the cgroup.
    CgroupLimits "cgroup-limits";
    /// The resource limits.
    ResourceLimits "resource-limits";
    /// The wall clock.
    WallClock "wall-clock";
    /// The caps on output.
    OutputCaps "output-caps";
    /// The random numbers of a template's copies are seeded anew.
    Reseeding "reseeding";
}
