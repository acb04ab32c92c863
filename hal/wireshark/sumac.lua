-- Dissects Sumac's packets in Wireshark and tshark: every field of the header by its name in `sumac_hal::wire`.
--
--   tshark -X lua_script:sumac.lua -r capture.pcapng -V
--
-- For Wireshark, copy this file to the folder "Personal Lua Plugins" (Help, About Wireshark, Folders). Packets are
-- recognised by their magic number, on any UDP port, whether captured by `sumac device --pcap` or on an interface.
-- Filters: sumac.kind == 8 (Naks), sumac.group == 3, sumac.seq == 17.
--
-- A test in `hal` compares offsets and names with the wire format, and what tshark shows with what was written.

local KINDS = {
    [1] = "Data", [2] = "Ref", [3] = "Empty", [4] = "Result", [5] = "Done", [6] = "Probe", [7] = "Status", [8] = "Nak",
    [9] = "Late", [10] = "Cut",
}
local REASONS = {
    [1] = "Missing", [2] = "Resend", [3] = "WrongEpoch", [4] = "UnknownGroup", [5] = "Mismatch", [6] = "PathLost",
    [7] = "Unsupported", [8] = "Stragglers", [9] = "Excluded",
}
local COLLECTIVES = {
    [1] = "all_reduce", [2] = "reduce", [3] = "broadcast", [4] = "reduce_scatter", [5] = "all_gather", [6] = "barrier",
    [7] = "gather", [8] = "scatter", [9] = "all_to_all", [10] = "all_to_all_v",
}
local DTYPES = {
    [1] = "i8", [2] = "u8", [3] = "i16", [4] = "u16", [5] = "i32", [6] = "u32", [7] = "i64", [8] = "u64", [9] = "f16",
    [10] = "bf16", [11] = "f32", [12] = "f64", [13] = "f8e4m3", [14] = "f8e5m2",
}
local OPS = {
    [1] = "sum", [2] = "prod", [3] = "min", [4] = "max", [5] = "avg", [6] = "premul_sum", [7] = "band", [8] = "bor",
    [9] = "bxor", [10] = "land", [11] = "lor", [12] = "lxor", [13] = "minloc", [14] = "maxloc",
}
local FLAGS = {
    [1] = "PARTIAL", [2] = "WANT", [4] = "CONGESTED", [8] = "SHARED", [16] = "LIMITED", [32] = "CUTS",
}

local HEADER_LEN = 96
local MAGIC = 0x434d5553
local VERSION = 1

-- name, offset, length in bytes, title, base, names of values
local FIELDS = {
    { "magic", 0, 4, "Magic", base.HEX },
    { "version", 4, 1, "Version", base.DEC },
    { "kind", 5, 1, "Kind", base.DEC, KINDS },
    { "flags", 6, 2, "Flags", base.HEX },
    { "collective", 8, 1, "Collective", base.DEC, COLLECTIVES },
    { "dtype", 9, 1, "Element type", base.DEC, DTYPES },
    { "op", 10, 1, "Operator", base.DEC, OPS },
    { "reason", 11, 1, "Nak reason", base.DEC, REASONS },
    { "group", 12, 4, "Group", base.DEC },
    { "epoch", 16, 4, "Epoch", base.HEX },
    { "child", 20, 2, "Child", base.DEC },
    { "count", 22, 2, "Count of seqs", base.DEC },
    { "seq", 24, 8, "Seq", base.DEC },
    { "mark", 32, 8, "Mark (up: have, down: stable)", base.DEC },
    { "key", 40, 8, "Key", base.HEX },
    { "signature", 48, 4, "Signature", base.HEX },
    { "token", 52, 4, "Token", base.HEX },
    { "window", 56, 2, "Window", base.DEC },
    { "payload_len", 58, 2, "Payload length", base.DEC },
    { "attempt", 60, 2, "Attempt", base.DEC },
    { "view", 62, 2, "View", base.DEC },
    { "bits", 64, 8, "Bits", base.HEX_DEC },
    { "bits2", 72, 8, "Bits 2", base.HEX_DEC },
    { "root", 80, 4, "Root", base.DEC },
    { "slowest", 84, 4, "Slowest rank, plus one", base.DEC },
    { "late_us", 88, 4, "Lateness of the slowest (us)", base.DEC },
    { "crc", 92, 4, "CRC-32C", base.HEX },
}

local sumac = Proto("sumac", "Sumac collective")

local constructors = {
    [1] = ProtoField.uint8, [2] = ProtoField.uint16, [4] = ProtoField.uint32, [8] = ProtoField.uint64,
}
local fields, flags = {}, {}
for index, field in ipairs(FIELDS) do
    local name, _, len, title, radix, names = table.unpack(field, 1, 6)
    fields[index] = constructors[len]("sumac." .. name, title, radix, names)
end
for bit, name in pairs(FLAGS) do
    flags[#flags + 1] = ProtoField.bool("sumac.flags." .. name:lower(), name, 16, nil, bit)
end
local payload = ProtoField.bytes("sumac.payload", "Payload")

local all = { payload }
for _, field in ipairs(fields) do all[#all + 1] = field end
for _, flag in ipairs(flags) do all[#all + 1] = flag end
sumac.fields = all

local function name_of(names, number)
    return names[number] or tostring(number)
end

function sumac.dissector(buffer, pinfo, tree)
    if buffer:len() < HEADER_LEN then return 0 end
    local subtree = tree:add(sumac, buffer())
    for index, field in ipairs(FIELDS) do
        local item = subtree:add_le(fields[index], buffer(field[2], field[3]))
        if field[1] == "flags" then
            for _, flag in ipairs(flags) do item:add_le(flag, buffer(field[2], field[3])) end
        end
    end
    if buffer:len() > HEADER_LEN then subtree:add(payload, buffer(HEADER_LEN)) end

    local kind, reason = buffer(5, 1):le_uint(), buffer(11, 1):le_uint()
    local info = name_of(KINDS, kind)
    if reason ~= 0 then info = info .. "(" .. name_of(REASONS, reason) .. ")" end
    info = info .. " group=" .. buffer(12, 4):le_uint() .. " child=" .. buffer(20, 2):le_uint()
    info = info .. " seq=" .. tostring(buffer(24, 8):le_uint64()) .. " count=" .. buffer(22, 2):le_uint()
    pinfo.cols.protocol = "Sumac"
    pinfo.cols.info = info
    subtree:append_text(", " .. info)
    return buffer:len()
end

sumac:register_heuristic("udp", function(buffer, pinfo, tree)
    if buffer:len() < HEADER_LEN or buffer(0, 4):le_uint() ~= MAGIC or buffer(4, 1):le_uint() ~= VERSION then
        return false
    end
    sumac.dissector(buffer, pinfo, tree)
    return true
end)
