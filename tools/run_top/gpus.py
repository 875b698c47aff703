# SPDX-License-Identifier: Apache-2.0
"""This host's GPUs, by NVML. The keys are those of ranks.json; a number that a GPU does not report is
missing."""

import ctypes
import time

NVLINK_FIELDS = (138, 139)  # KiB sent and received since the driver was loaded
ALL_LINKS = 0xFFFFFFFF
NAME_BYTES = 96


class Pci(ctypes.Structure):
    _fields_ = [
        ("short_bus_id", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Field(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("time", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


def same_bus_id(first, second):
    """CUDA writes the domain with four digits, NVML with eight."""

    def parts(text):
        domain, _, rest = text.lower().partition(":")
        return domain.lstrip("0"), rest

    return bool(first and second) and parts(first) == parts(second)


class Nvml:
    """NVML of this host; without a driver there are no GPUs."""

    def __init__(self, library="libnvidia-ml.so.1"):
        self._devices = []
        self._links = {}  # by GPU: (time, bytes)
        try:
            self._nvml = ctypes.CDLL(library)
            if self._nvml.nvmlInit_v2() != 0:
                return
            count = self._call("nvmlDeviceGetCount_v2", ctypes.c_uint)
        except (OSError, AttributeError):
            return
        for index in range(count.value if count else 0):
            device = self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, index)
            if device:
                self._devices.append(device)

    def _call(self, name, result, *arguments):
        """The result; None where the driver lacks the function or the GPU the number."""
        function = getattr(self._nvml, name, None)
        value = result()
        return value if function is not None and function(*arguments, ctypes.byref(value)) == 0 else None

    def _number(self, name, device, *arguments, scale=1):
        value = self._call(name, ctypes.c_uint, device, *arguments)
        return value.value / scale if value else None

    def read(self):
        """A record of each GPU."""
        records = []
        for index, device in enumerate(self._devices):
            record = self._record(index, device)
            records.append({key: value for key, value in record.items() if value is not None})
        return records

    def _record(self, index, device):
        pci = self._call("nvmlDeviceGetPciInfo_v3", Pci, device)
        memory = self._call("nvmlDeviceGetMemoryInfo", Memory, device)
        use = self._call("nvmlDeviceGetUtilizationRates", Utilisation, device)
        # In kB/s.
        pcie = [self._number("nvmlDeviceGetPcieThroughput", device, direction) for direction in (0, 1)]
        return {
            "device": f"gpu:{index}",
            "gpu_type": self._name(device),
            "pci_bus_id": pci.bus_id.decode() if pci else None,
            "utilisation_percent": use.gpu if use else None,
            "memory_gib": memory.used / 2**30 if memory else None,
            "memory_total_gib": memory.total / 2**30 if memory else None,
            "temperature_c": self._number("nvmlDeviceGetTemperature", device, 0),
            "power_w": self._number("nvmlDeviceGetPowerUsage", device, scale=1000),
            "sm_clock_mhz": self._number("nvmlDeviceGetClockInfo", device, 1),
            "memory_clock_mhz": self._number("nvmlDeviceGetClockInfo", device, 2),
            "pcie_mb_per_second": None if None in pcie else sum(pcie) / 1000,
            "nvlink_mb_per_second": self._nvlink_rate(index, device),
        }

    def _name(self, device):
        text = ctypes.create_string_buffer(NAME_BYTES)
        return text.value.decode() if self._nvml.nvmlDeviceGetName(device, text, NAME_BYTES) == 0 else None

    def _nvlink_rate(self, index, device):
        """Since the last call; None in the first."""
        fields = (Field * 2)(*(Field(field=field, scope=ALL_LINKS) for field in NVLINK_FIELDS))
        function = getattr(self._nvml, "nvmlDeviceGetFieldValues", None)
        if function is None or function(device, 2, fields) != 0 or any(field.result for field in fields):
            return None
        now, count = time.monotonic(), 1024 * sum(field.value for field in fields)
        before, self._links[index] = self._links.get(index), (now, count)
        return (count - before[1]) / (now - before[0]) / 1e6 if before else None
