"""What stands in the way of cuFile's PCI P2PDMA mode on this machine, whatever the volume."""

import gzip

from offloadd.doctor import nvidia
from offloadd.doctor.cufile_json import cufile_json_path, parse, section
from offloadd.machine.gds_ways import Obstacle
from offloadd.machine.system import System

#: What PCI P2PDMA mode needs: user pages of peer memory came with Linux 6.2, their mapping of GPU memory with driver 565.
KERNEL_MIN = (6, 2)
DRIVER_MIN = 565


def p2pdma_obstacle(system: System) -> Obstacle | None:
    """What keeps PCI P2PDMA mode from working on this machine, whatever the volume; None if nothing is known to."""
    driver, kernel = nvidia.driver(system), system.kernel()
    if driver is None:
        return Obstacle("no NVIDIA driver", "modprobe nvidia")
    if kernel < KERNEL_MIN:
        return Obstacle(f"Linux {kernel[0]}.{kernel[1]}; 6.2 or newer is needed")
    if driver.major < DRIVER_MIN:
        return Obstacle(f"driver {driver.version}; {DRIVER_MIN} or newer is needed", "apt-get install nvidia-open")
    if driver.is_open is False:
        return Obstacle("the kernel module is the proprietary one; the open one is needed", "apt-get install nvidia-open")
    if _kernel_has_p2pdma(system) is False:
        return Obstacle("this kernel was built without CONFIG_PCI_P2PDMA")
    if system.text("/sys/module/nvme_core/parameters/multipath") == "Y":
        return Obstacle(
            "NVMe multipath is on; P2PDMA needs it off", "echo 'options nvme_core multipath=N' > /etc/modprobe.d/nvme.conf && update-initramfs -u && reboot"
        )
    if not _static_bar(system):
        return Obstacle(
            "the driver was not told to map all GPU memory (RMForceStaticBar1)",
            "echo 'options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"' > /etc/modprobe.d/nvidia-p2pdma.conf && reboot",
        )
    if not _told_to_use_p2pdma(system):
        return Obstacle(f"{cufile_json_path(system)} does not set properties.use_pci_p2pdma", "set properties.use_pci_p2pdma to true")
    return None


def _kernel_has_p2pdma(system: System) -> bool | None:
    """None where the kernel's configuration is not to be found."""
    text = system.text(f"/boot/config-{system.text('/proc/sys/kernel/osrelease')}")
    if text is None:
        try:
            text = gzip.decompress(system.path("/proc/config.gz").read_bytes()).decode()
        except (OSError, EOFError):
            return None
    return "CONFIG_PCI_P2PDMA=y" in text.split()


def _static_bar(system: System) -> bool:
    # Arm platforms map all of it anyway, and a file that can't be read proves nothing.
    parameters = system.text("/proc/driver/nvidia/params")
    return parameters is None or system.exists("/usr/lib/aarch64-linux-gnu") or "RMForceStaticBar1=1" in parameters


def _told_to_use_p2pdma(system: System) -> bool:
    try:
        return section(parse(system.text(cufile_json_path(system)) or "{}"), "properties").get("use_pci_p2pdma") is True
    except ValueError:
        return False
